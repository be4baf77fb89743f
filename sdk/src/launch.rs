//! Kernels and their launches.

use crate::{Buffer, Pod, Pollable, Result, compute};

/// A kernel module that was loaded.
#[derive(Debug)]
pub struct Kernels {
    raw: compute::Kernels,
}

impl Kernels {
    /// Takes the bytes of a core Wasm module whose exports are kernels.
    pub fn load(wasm: &[u8]) -> Result<Kernels> {
        Ok(Kernels { raw: compute::Kernels::load(wasm)? })
    }

    /// What the module exports.
    pub fn names(&self) -> Vec<String> {
        self.raw.names()
    }

    /// Runs a kernel once for every work item. Returns before it is done; it is done before anything that is asked of
    /// the device later.
    pub fn launch(&self, kernel: &str, grid: Grid, arguments: &[Argument<'_>]) -> Result<Launch> {
        let arguments: Vec<compute::Argument<'_>> = arguments.iter().map(Argument::raw).collect();
        let raw = self.raw.launch(kernel, size(grid.groups), size(grid.items), &arguments)?;
        Ok(Launch { raw })
    }
}

/// How many work items a launch has: groups, and items of each group, in three dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    pub groups: [u32; 3],
    pub items: [u32; 3],
}

impl Grid {
    /// At least `count` items in one dimension, in groups of `items`. The last group may reach beyond: a kernel
    /// compares its number with the count.
    pub fn linear(count: u32, items: u32) -> Grid {
        Grid::cover([count, 1, 1], [items, 1, 1])
    }

    /// At least `width` by `height` items.
    pub fn plane(width: u32, height: u32, items: [u32; 2]) -> Grid {
        Grid::cover([width, height, 1], [items[0], items[1], 1])
    }

    /// At least so many items in each dimension, and at least one group: there is no launch of nothing.
    pub fn cover(counts: [u32; 3], items: [u32; 3]) -> Grid {
        let items = items.map(|items| items.max(1));
        let groups = std::array::from_fn(|d| counts[d].div_ceil(items[d]).max(1));
        Grid { groups, items }
    }
}

fn size([x, y, z]: [u32; 3]) -> compute::Size {
    compute::Size { x, y, z }
}

/// An argument of a launch: a number, or a buffer for a parameter that is a pointer.
#[derive(Debug, Clone, Copy)]
pub struct Argument<'a>(Value<'a>);

#[derive(Debug, Clone, Copy)]
enum Value<'a> {
    I32(i32),
    I64(i64),
    F32(f32),
    F64(f64),
    Buffer(&'a compute::Buffer),
}

impl<'a> Argument<'a> {
    fn raw(&self) -> compute::Argument<'a> {
        match self.0 {
            Value::I32(value) => compute::Argument::S32(value),
            Value::I64(value) => compute::Argument::S64(value),
            Value::F32(value) => compute::Argument::F32(value),
            Value::F64(value) => compute::Argument::F64(value),
            Value::Buffer(buffer) => compute::Argument::Buffer(buffer),
        }
    }
}

impl From<i32> for Argument<'_> {
    fn from(value: i32) -> Self {
        Argument(Value::I32(value))
    }
}

/// Integers of Wasm have no sign: a kernel may take it as unsigned.
impl From<u32> for Argument<'_> {
    fn from(value: u32) -> Self {
        Argument(Value::I32(value.cast_signed()))
    }
}

impl From<i64> for Argument<'_> {
    fn from(value: i64) -> Self {
        Argument(Value::I64(value))
    }
}

impl From<u64> for Argument<'_> {
    fn from(value: u64) -> Self {
        Argument(Value::I64(value.cast_signed()))
    }
}

impl From<f32> for Argument<'_> {
    fn from(value: f32) -> Self {
        Argument(Value::F32(value))
    }
}

impl From<f64> for Argument<'_> {
    fn from(value: f64) -> Self {
        Argument(Value::F64(value))
    }
}

impl<'a, T: Pod> From<&'a Buffer<T>> for Argument<'a> {
    fn from(buffer: &'a Buffer<T>) -> Self {
        Argument(Value::Buffer(&buffer.raw))
    }
}

/// A launch under way. Dropping it does not stop the launch.
#[derive(Debug)]
#[must_use = "how a launch ended is learned by waiting for it"]
pub struct Launch {
    raw: compute::Completion,
}

impl Launch {
    /// Waits for the launch and says how it ended.
    pub fn wait(&self) -> Result<()> {
        Ok(self.raw.wait()?)
    }

    /// Becomes ready when the launch is done.
    pub fn pollable(&self) -> Pollable {
        self.raw.subscribe()
    }
}
