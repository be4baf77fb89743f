//! Mathematics by the device, for f32 and f64. A function is imported only by kernels that call it.

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident($($argument:ident),+) = $f32:ident, $f64:ident;)*) => {
        #[link(wasm_import_module = "kernel")]
        unsafe extern "C" {
            $(
                safe fn $f32($($argument: f32),+) -> f32;
                safe fn $f64($($argument: f64),+) -> f64;
            )*
        }

        /// f32 and f64.
        pub trait Float: Copy + sealed::Sealed {
            $(
                #[doc(hidden)]
                fn $name($($argument: Self),+) -> Self;
            )*
        }

        impl Float for f32 {
            $(
                #[inline(always)]
                fn $name($($argument: f32),+) -> f32 {
                    $f32($($argument),+)
                }
            )*
        }

        impl Float for f64 {
            $(
                #[inline(always)]
                fn $name($($argument: f64),+) -> f64 {
                    $f64($($argument),+)
                }
            )*
        }

        $(
            $(#[$doc])*
            #[inline(always)]
            pub fn $name<T: Float>($($argument: T),+) -> T {
                T::$name($($argument),+)
            }
        )*
    };
}

functions! {
    /// `a * b + c`, rounded once.
    fma(a, b, c) = fma_f32, fma_f64;
    sqrt(x) = sqrt_f32, sqrt_f64;
    /// `1 / sqrt(x)`.
    rsqrt(x) = rsqrt_f32, rsqrt_f64;
    exp(x) = exp_f32, exp_f64;
    exp2(x) = exp2_f32, exp2_f64;
    /// The natural logarithm.
    log(x) = log_f32, log_f64;
    log2(x) = log2_f32, log2_f64;
    sin(x) = sin_f32, sin_f64;
    cos(x) = cos_f32, cos_f64;
    tanh(x) = tanh_f32, tanh_f64;
    /// `x` to the power of `y`.
    pow(x, y) = pow_f32, pow_f64;
}
