//! Random numbers by counting: the number of an element and a seed are all that a random number is made from, so it is
//! the same on every device, in every order, and however an expression is fused. Philox 4×32 with ten rounds.

/// The element's number from 0 up to 1, with 24 bits.
#[inline]
pub(crate) fn uniform(seed: u64, element: u64) -> f32 {
    let block = philox(seed, element / 4);
    let bits = block[(element % 4) as usize];
    (bits >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// Four random words for a block of four elements.
#[expect(clippy::cast_possible_truncation, reason = "words are the halves of what they are made from")]
#[inline]
fn philox(seed: u64, block: u64) -> [u32; 4] {
    const MULTIPLIERS: (u64, u64) = (0xD251_1F53, 0xCD9E_8D57);
    const WEYL: (u32, u32) = (0x9E37_79B9, 0xBB67_AE85);
    let mut counter = [block as u32, (block >> 32) as u32, 0, 0];
    let mut key = (seed as u32, (seed >> 32) as u32);
    for _ in 0..10 {
        let (a, b) = (MULTIPLIERS.0 * u64::from(counter[0]), MULTIPLIERS.1 * u64::from(counter[2]));
        counter = [(b >> 32) as u32 ^ counter[1] ^ key.0, b as u32, (a >> 32) as u32 ^ counter[3] ^ key.1, a as u32];
        key = (key.0.wrapping_add(WEYL.0), key.1.wrapping_add(WEYL.1));
    }
    counter
}

/// Another seed from one, for what needs several.
pub(crate) fn split(seed: u64, n: u64) -> u64 {
    let block = philox(seed, n ^ 0x5eed_0000_0000_0000);
    u64::from(block[0]) << 32 | u64::from(block[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_generator_it_says_it_is() {
        // The known answers of the generator's authors, for counters and keys that have their last words zero here.
        assert_eq!(philox(0, 0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    }

    #[test]
    fn numbers_are_spread_evenly() {
        let numbers: Vec<f32> = (0..100_000).map(|n| uniform(7, n)).collect();
        assert!(numbers.iter().all(|x| (0.0..1.0).contains(x)));
        let mean = numbers.iter().map(|x| f64::from(*x)).sum::<f64>() / 1e5;
        assert!((mean - 0.5).abs() < 0.005, "{mean}");
        for bin in 0..10 {
            let (low, high) = (bin as f32 / 10.0, (bin + 1) as f32 / 10.0);
            let count = numbers.iter().filter(|x| (low..high).contains(*x)).count();
            assert!((9_500..10_500).contains(&count), "{count} from {low} to {high}");
        }
        assert_ne!(split(7, 0), split(7, 1));
    }
}
