//! Kernels that a host builds from operations and launches through the same protocol as kernels of guests.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng;
use tensor_wasm_gpu::{Device, DeviceChoice, OpenOptions, TenantLimits};
use tensor_wasm_jit::Ty;
use tensor_wasm_jit::build::{Axis, BinaryOp, BuildError, BuiltKernel, IdKind, KernelBuilder};
use tensor_wasm_launch::{Argument, KernelError, KernelModule, Kernels, LaunchStream};

/// Not a multiple of the group.
const N: usize = 1003;
const GROUP: u32 = 128;
const BUDGET: Duration = Duration::from_secs(10);

/// y[i] = a * x[i] + y[i]
fn saxpy() -> Result<BuiltKernel, BuildError> {
    let mut b = KernelBuilder::new("saxpy");
    let (n, a) = (b.scalar(Ty::I32)?, b.scalar(Ty::F32)?);
    let (x, y) = (b.window()?, b.window()?);
    let i = b.id(IdKind::Global, Axis::X)?;
    let is_inside = b.binary(BinaryOp::I32LtU, i, n)?;
    b.begin_if(is_inside, &[])?;
    b.locate("a * x[i] + y[i]");
    let (x, y) = (b.element(x, i, 4)?, b.element(y, i, 4)?);
    let (x, old) = (b.load(Ty::F32, x, 0)?, b.load(Ty::F32, y, 0)?);
    let sum = b.fma(a, x, old)?;
    b.store(sum, y, 0)?;
    b.end()?;
    b.finish()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

async fn launch(
    stream: &LaunchStream,
    module: &Arc<KernelModule>,
    items: u32,
    arguments: &[Argument],
) -> Result<(), KernelError> {
    let groups = items.div_ceil(GROUP);
    stream.launch(module, "saxpy", [groups, 1, 1], [GROUP, 1, 1], arguments, BUDGET).await?.wait().await
}

#[test]
fn a_kernel_that_a_host_built_is_launched_as_any_other() {
    let threads = tokio::runtime::Runtime::new().unwrap();
    for choice in [DeviceChoice::Cpu, DeviceChoice::Cuda(0)] {
        let host = tensor_wasm_exec::engine::cpu_kernels::host_kernels();
        let device = match Device::open(&OpenOptions { choice, host, ..OpenOptions::default() }) {
            Ok(device) => device,
            Err(error) => {
                assert_ne!(choice, DeviceChoice::Cpu, "{error}");
                println!("skipped: no CUDA device: {error}");
                continue;
            }
        };
        let kernels = Kernels::new(device, None, threads.handle().clone());
        let stream = kernels.tenant("built", TenantLimits::default()).unwrap().stream();
        let module = Arc::new(KernelModule::built(saxpy().unwrap()));
        let mut rng = rand::rng();
        let mut random = || -> Vec<f32> { (0..N).map(|_| rng.random_range(-1e3..1e3)).collect() };
        let (x, y) = (random(), random());
        let size = 4 * N as u64;
        let (on_x, on_y) = (stream.kernels.tenant.buffer(size).unwrap(), stream.kernels.tenant.buffer(size).unwrap());
        stream.stream.write_blocking(on_x.handle(), 0, &bytes(&x)).unwrap();
        stream.stream.write_blocking(on_y.handle(), 0, &bytes(&y)).unwrap();
        let a = 0.37_f32;
        let memory = [Argument::Buffer(on_x.handle()), Argument::Buffer(on_y.handle())];
        let arguments = |n: usize| {
            let numbers = [Argument::I32(i32::try_from(n).unwrap()), Argument::F32(a)];
            [&numbers[..], &memory[..]].concat()
        };
        threads.block_on(async {
            launch(&stream, &module, 1003, &arguments(N)).await.unwrap();
            let mut seen = vec![0xa5; 4 * N];
            stream.stream.read_blocking(on_y.handle(), 0, &mut seen).unwrap();
            let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| a.mul_add(*x, *y)).collect();
            assert!(seen == bytes(&expected), "every element on {choice}");
            // It is fenced and deadlined as a guest's is, and says where it was.
            let beyond = launch(&stream, &module, 2000, &arguments(2000)).await.unwrap_err();
            assert!(
                matches!(&beyond, KernelError::Trap(why) if why.contains("a * x[i] + y[i]")),
                "{choice}: {beyond:?}"
            );
            // A number where a window is, and a window where a number is.
            let wrong = [Argument::I32(1), Argument::F32(a), Argument::I32(0), memory[1].clone()];
            let refused = launch(&stream, &module, 1, &wrong).await.unwrap_err();
            assert!(matches!(&refused, KernelError::Arguments(why) if why.contains("argument 2")), "{refused:?}");
            let wrong = [memory[0].clone(), Argument::F32(a), memory[0].clone(), memory[1].clone()];
            let refused = launch(&stream, &module, 1, &wrong).await.unwrap_err();
            assert!(matches!(&refused, KernelError::Arguments(why) if why.contains("argument 0")), "{refused:?}");
        });
        // What one stream's launch left behind is not another's: both count theirs from one.
        let streams = [stream.kernels.stream(), stream.kernels.stream()];
        assert_ne!(streams[0].stream.index(), streams[1].stream.index());
        threads.block_on(async {
            for round in 0..4 {
                let trapped = launch(&streams[0], &module, 2000, &arguments(2000)).await;
                assert!(matches!(&trapped, Err(KernelError::Trap(_))), "{choice}, {round}: {trapped:?}");
                launch(&streams[1], &module, 1003, &arguments(N)).await.unwrap();
            }
        });
        // The same operations are the same kernel: nothing is compiled again.
        let compiled = kernels.counts().0;
        let again = Arc::new(KernelModule::built(saxpy().unwrap()));
        threads.block_on(launch(&stream, &again, 1003, &arguments(N))).unwrap();
        assert_eq!(kernels.counts().0, compiled);
    }
}
