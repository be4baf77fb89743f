//! Numbers of 16 bits in memory: what they are as floats, and floats as the nearest of them.

mod import {
    #[link(wasm_import_module = "kernel")]
    unsafe extern "C" {
        pub(crate) safe fn f16_to_f32(bits: u32) -> f32;
        pub(crate) safe fn f32_to_f16(value: f32) -> u32;
        pub(crate) safe fn bf16_to_f32(bits: u32) -> f32;
        pub(crate) safe fn f32_to_bf16(value: f32) -> u32;
    }
}

/// What the bits of an IEEE half (5 bits of exponent, 10 of fraction) stand for, exactly.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    import::f16_to_f32(u32::from(bits))
}

/// The bits of the nearest half, ties to even. Beyond the greatest it is infinite; small ones become subnormal.
#[inline(always)]
pub fn f32_to_f16(value: f32) -> u16 {
    import::f32_to_f16(value) as u16
}

/// What the bits of a bfloat (the upper half of an f32) stand for, exactly.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    import::bf16_to_f32(u32::from(bits))
}

/// The bits of the nearest bfloat, ties to even.
#[inline(always)]
pub fn f32_to_bf16(value: f32) -> u16 {
    import::f32_to_bf16(value) as u16
}
