//! Learning rates that change with time.

/// A learning rate as a function of the number of the step, from zero on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Schedule {
    Constant(f64),
    /// Multiplied by `factor` every so many steps.
    Step {
        rate: f64,
        every: u64,
        factor: f64,
    },
    /// Multiplied by `factor` in each step.
    Exponential {
        rate: f64,
        factor: f64,
    },
    /// From `rate` to `end` along half a wave, over so many steps; `warmup` of them rise from zero first.
    Cosine {
        rate: f64,
        end: f64,
        steps: u64,
        warmup: u64,
    },
}

impl Schedule {
    pub fn rate(self, step: u64) -> f64 {
        match self {
            Schedule::Constant(rate) => rate,
            Schedule::Step { rate, every, factor } => rate * factor.powf((step / every.max(1)) as f64),
            Schedule::Exponential { rate, factor } => rate * factor.powf(step as f64),
            Schedule::Cosine { rate, warmup, .. } if step < warmup => rate * (step + 1) as f64 / warmup as f64,
            Schedule::Cosine { rate, end, steps, warmup } => {
                let span = steps.saturating_sub(warmup).max(1) as f64;
                let part = ((step - warmup) as f64 / span).min(1.0);
                end + (rate - end) * 0.5 * (1.0 + (std::f64::consts::PI * part).cos())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_begin_and_end_where_they_should() {
        let step = Schedule::Step { rate: 1.0, every: 10, factor: 0.5 };
        assert_eq!((step.rate(0), step.rate(9), step.rate(10), step.rate(25)), (1.0, 1.0, 0.5, 0.25));
        let falling = Schedule::Exponential { rate: 2.0, factor: 0.9 };
        assert!((falling.rate(3) - 2.0 * 0.729).abs() < 1e-12);
        let wave = Schedule::Cosine { rate: 1.0, end: 0.1, steps: 110, warmup: 10 };
        assert_eq!((wave.rate(0), wave.rate(9), wave.rate(10)), (0.1, 1.0, 1.0));
        assert!((wave.rate(60) - 0.55).abs() < 1e-12 && (wave.rate(110) - 0.1).abs() < 1e-12);
        assert_eq!((Schedule::Constant(0.3).rate(7), wave.rate(10_000)), (0.3, 0.1));
    }
}
