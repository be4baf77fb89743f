//! What a plan should take on a processor: a roofline. Each kernel takes as long as the slower of its bytes and its
//! arithmetic, and something for being a kernel; copies of what lies on the other side come on top.

use crate::dtype::DType;
use crate::schedule::ExplainedKernel;

/// Amounts of bytes at which the rate of moving them is known.
pub(crate) const RATES: usize = 3;

/// How fast a processor is. All times in seconds, all rates in units a second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Speeds {
    /// What a plan costs however small it is: sending it, and hearing that it is done.
    pub run: f64,
    /// What each of its kernels costs besides.
    pub kernel: f64,
    /// How fast bytes are moved where a plan has so many of them: few stay in a cache from one run to the next.
    pub rates: [(f64, f64); RATES],
    /// Simple operations on elements.
    pub operations: f64,
    /// Operations of products of matrices, by type.
    pub products_f32: f64,
    pub products_f64: f64,
    pub products_half: f64,
}

/// Amounts of bytes whose copies were timed.
pub(crate) const COPIES: usize = 4;

/// The way between two memories: what copies of some amounts took. Small ones travel with their jobs, larger ones
/// through staging, by one thread and by several: no one rate is true of all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Link {
    /// Bytes and seconds, from few to many.
    pub to_gpu: [(f64, f64); COPIES],
    pub from_gpu: [(f64, f64); COPIES],
}

/// What a plan has to do, as [`crate::Tensor::explain`] counts it.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Work {
    pub kernels: Vec<KernelWork>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct KernelWork {
    pub bytes: f64,
    /// Simple operations on elements.
    pub operations: f64,
    /// Multiplications and additions of a product.
    pub flops: f64,
    pub dtype: DType,
}

/// Operations that an element costs where it is not read or written in order.
const SCATTERED: f64 = 8.0;

/// What an operation on an element costs in simple ones, as on tiles of a CPU.
fn cost(operation: &str) -> f64 {
    match operation {
        "div" | "recip" | "sqrt" | "rsqrt" => 4.0,
        "exp" | "expm1" | "ln" | "ln1p" | "tanh" | "erf" | "sin" | "cos" => 12.0,
        "rem" | "pow" | "random" => 40.0,
        _ => 1.0,
    }
}

impl Work {
    pub(crate) fn of(kernels: &[ExplainedKernel]) -> Work {
        Work { kernels: kernels.iter().map(KernelWork::of).collect() }
    }

    pub(crate) fn bytes(&self) -> f64 {
        self.kernels.iter().map(|kernel| kernel.bytes).sum()
    }

    /// Seconds on a processor, with everything that it reads there already.
    pub(crate) fn time(&self, speeds: &Speeds) -> f64 {
        let rate = speeds.rate(self.bytes());
        let kernel = |kernel: &KernelWork| {
            let products = match kernel.dtype {
                DType::F16 | DType::BF16 => speeds.products_half,
                DType::F64 => speeds.products_f64,
                _ => speeds.products_f32,
            };
            let arithmetic = kernel.operations / speeds.operations + kernel.flops / products;
            speeds.kernel + arithmetic.max(kernel.bytes / rate)
        };
        speeds.run + self.kernels.iter().map(kernel).sum::<f64>()
    }
}

impl Speeds {
    /// Between two amounts, in proportion to their orders of magnitude.
    fn rate(&self, bytes: f64) -> f64 {
        let after = self.rates.iter().position(|(known, _)| bytes < *known).unwrap_or(RATES);
        if after == 0 || after == RATES {
            return self.rates[after.min(RATES - 1)].1;
        }
        let ((low, first), (high, second)) = (self.rates[after - 1], self.rates[after]);
        let part = (bytes / low).ln() / (high / low).ln();
        first * (second / first).powf(part)
    }
}

impl KernelWork {
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    fn of(kernel: &ExplainedKernel) -> KernelWork {
        let ExplainedKernel { kind, operations, read_bytes, written_bytes, flops, dtype, shape, .. } = kernel;
        let bytes = (read_bytes + written_bytes) as f64;
        let elements = shape.iter().product::<usize>() as f64;
        let names: f64 = operations.iter().map(|name| cost(name)).sum();
        let (operations, flops) = match *kind {
            "map" => (names * elements, 0.0),
            "matmul" | "contract" | "attention" | "attention_rows" | "attention_queries" | "attention_keys" => {
                (names * elements, *flops as f64)
            }
            // Extremes are of more elements than there are results, and sorting looks at each several times.
            _ => (SCATTERED * elements.max(*flops as f64) + names * elements, 0.0),
        };
        KernelWork { bytes, operations, flops, dtype: *dtype }
    }
}

impl Link {
    /// Seconds for as many buffers of so many bytes together.
    pub(crate) fn time(&self, buffers: usize, bytes: f64, to: super::Processor) -> f64 {
        let known = if to == super::Processor::Gpu { &self.to_gpu } else { &self.from_gpu };
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let buffers = buffers.max(1) as f64;
        let each = bytes / buffers;
        let after = known.iter().position(|(known, _)| each <= *known).unwrap_or(COPIES);
        let seconds = match after {
            0 => known[0].1,
            COPIES => known[COPIES - 1].1 * each / known[COPIES - 1].0,
            _ => {
                let ((low, first), (high, last)) = (known[after - 1], known[after]);
                first + (last - first) * (each - low) / (high - low)
            }
        };
        buffers * seconds
    }
}
