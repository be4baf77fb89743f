//! What the items of a subgroup do together, from register to register.

mod sealed {
    pub trait Sealed {}
    impl Sealed for i32 {}
    impl Sealed for i64 {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

mod import {
    #[link(wasm_import_module = "kernel")]
    unsafe extern "C" {
        pub(crate) safe fn subgroup_size() -> u32;
        pub(crate) safe fn subgroup_lane() -> u32;
        pub(crate) safe fn subgroup_ballot(value: i32) -> u32;
        pub(crate) safe fn subgroup_any(value: i32) -> i32;
        pub(crate) safe fn subgroup_all(value: i32) -> i32;
    }
}

macro_rules! values {
    ($($ty:ident: $shuffle:ident $shuffle_xor:ident $add:ident $min:ident $max:ident;)*) => {
        #[link(wasm_import_module = "kernel")]
        unsafe extern "C" {
            $(
                safe fn $shuffle(value: $ty, lane: u32) -> $ty;
                safe fn $shuffle_xor(value: $ty, mask: u32) -> $ty;
                safe fn $add(value: $ty) -> $ty;
                safe fn $min(value: $ty) -> $ty;
                safe fn $max(value: $ty) -> $ty;
            )*
        }

        /// i32, i64, f32 and f64.
        pub trait SubgroupValue: Copy + sealed::Sealed {
            #[doc(hidden)]
            fn shuffle(self, lane: u32) -> Self;
            #[doc(hidden)]
            fn shuffle_xor(self, mask: u32) -> Self;
            #[doc(hidden)]
            fn add(self) -> Self;
            #[doc(hidden)]
            fn min(self) -> Self;
            #[doc(hidden)]
            fn max(self) -> Self;
        }

        $(
            impl SubgroupValue for $ty {
                #[inline(always)]
                fn shuffle(self, lane: u32) -> $ty {
                    $shuffle(self, lane)
                }

                #[inline(always)]
                fn shuffle_xor(self, mask: u32) -> $ty {
                    $shuffle_xor(self, mask)
                }

                #[inline(always)]
                fn add(self) -> $ty {
                    $add(self)
                }

                #[inline(always)]
                fn min(self) -> $ty {
                    $min(self)
                }

                #[inline(always)]
                fn max(self) -> $ty {
                    $max(self)
                }
            }
        )*
    };
}

values! {
    i32: shuffle_i32 shuffle_xor_i32 subgroup_add_i32 subgroup_min_i32 subgroup_max_i32;
    i64: shuffle_i64 shuffle_xor_i64 subgroup_add_i64 subgroup_min_i64 subgroup_max_i64;
    f32: shuffle_f32 shuffle_xor_f32 subgroup_add_f32 subgroup_min_f32 subgroup_max_f32;
    f64: shuffle_f64 shuffle_xor_f64 subgroup_add_f64 subgroup_min_f64 subgroup_max_f64;
}

/// How many items a subgroup has at most: 32. A group's last one may have fewer.
#[inline(always)]
pub fn subgroup_size() -> u32 {
    import::subgroup_size()
}

/// The item's number in its subgroup. Subgroups are made of a group's items in their order, along dimension 0 first.
#[inline(always)]
pub fn subgroup_lane() -> u32 {
    import::subgroup_lane()
}

/// What the item of that number has; zero if that does not take part, or is no number of an item.
///
/// Of this and of all that follows: an item waits until every other of its subgroup has come to one of these functions
/// or to a barrier, or has ended. Those that have come to the same function, of the same type, take part in it,
/// wherever in the compiled code each of them is; for them the others are not there.
#[inline(always)]
pub fn shuffle<T: SubgroupValue>(value: T, lane: u32) -> T {
    value.shuffle(lane)
}

/// What the item has whose number differs from the own one in these bits; zero if that does not take part.
#[inline(always)]
pub fn shuffle_xor<T: SubgroupValue>(value: T, mask: u32) -> T {
    value.shuffle_xor(mask)
}

/// The sum over the subgroup, in one order everywhere: each item's value and that of the item whose number differs in
/// bit 16, then what both have with what two others have, and so on, down to bit 1.
#[inline(always)]
pub fn subgroup_add<T: SubgroupValue>(value: T) -> T {
    value.add()
}

/// The least of the subgroup; NaN if any is.
#[inline(always)]
pub fn subgroup_min<T: SubgroupValue>(value: T) -> T {
    value.min()
}

/// The greatest of the subgroup; NaN if any is.
#[inline(always)]
pub fn subgroup_max<T: SubgroupValue>(value: T) -> T {
    value.max()
}

/// A bit for each item of the subgroup, by its number: whether it says so.
#[inline(always)]
pub fn subgroup_ballot(says_so: bool) -> u32 {
    import::subgroup_ballot(i32::from(says_so))
}

/// Whether any item of the subgroup says so.
#[inline(always)]
pub fn subgroup_any(says_so: bool) -> bool {
    import::subgroup_any(i32::from(says_so)) != 0
}

/// Whether all that take part say so.
#[inline(always)]
pub fn subgroup_all(says_so: bool) -> bool {
    import::subgroup_all(i32::from(says_so)) != 0
}
