//! A component that misuses the device, one way for each function.

wit_bindgen::generate!({ world: "hostile" });

use tensor_wasm_sdk::{Argument, Buffer, Grid, Kernels, Launch, Result};

struct Hostile;

const KERNELS: &[u8] = include_bytes!(env!("EXAMPLE_KERNELS"));

/// Stores a number, as code that nothing fences.
const PTX: &[u8] = b".version 8.0
.target sm_75
.address_size 64
.visible .entry k(.param .u64 out) {
\t.reg .b64 %out;
\tld.param.u64 %out, [out];
\tst.global.u32 [%out], 42;
\tret;
}
";

/// More than any device runs at once.
const EVERYWHERE: Grid = Grid { groups: [4096, 1, 1], items: [256, 1, 1] };

const ONE: Grid = Grid { groups: [1; 3], items: [1; 3] };

/// A group of 256, which is more than a warp: some of what goes wrong does so between warps.
const GROUP: Grid = Grid { groups: [1; 3], items: [256, 1, 1] };

impl Guest for Hostile {
    fn out_of_bounds() -> String {
        text(buffer(16).and_then(|out| launch("store_at", ONE, &[16_u32.into(), (&out).into()])?.wait()))
    }

    fn endless() -> String {
        text(buffer(16).and_then(|out| launch("endless", EVERYWHERE, &[(&out).into()])?.wait()))
    }

    fn half_a_barrier() -> String {
        text(buffer(256).and_then(|out| launch("half_a_barrier", GROUP, &[(&out).into()])?.wait()))
    }

    fn one_lane() -> String {
        let grid = Grid { groups: [64, 1, 1], items: [256, 1, 1] };
        text(buffer(64 * 256).and_then(|out| launch("one_lane", grid, &[0.into(), (&out).into()])?.wait()))
    }

    fn divide_by_zero() -> String {
        text(buffer(1).and_then(|out| launch("divide", ONE, &[7.into(), 0.into(), (&out).into()])?.wait()))
    }

    fn panics() -> String {
        text(launch("panics", ONE, &[3.into()]).and_then(|launch| launch.wait()))
    }

    fn too_large() -> String {
        text(spin(1, Grid { groups: [1 << 31, 1, 1], items: [1; 3] }))
    }

    fn too_many_items() -> String {
        text(spin(1, Grid { groups: [1; 3], items: [1 << 20, 1, 1] }))
    }

    fn no_groups() -> String {
        text(spin(1, Grid { groups: [0, 1, 1], items: [1; 3] }))
    }

    fn huge_allocation() -> String {
        // Nearly 2^50 bytes.
        text(Buffer::<[u64; 1 << 15]>::zeroed(usize::MAX).map(drop))
    }

    fn hoard(bytes_each: u32) -> String {
        let mut all = Vec::new();
        loop {
            match Buffer::<u8>::zeroed(bytes_each as usize) {
                Ok(buffer) => all.push(buffer),
                Err(error) => return format!("{} bytes, then: {error}", all.len() as u64 * u64::from(bytes_each)),
            }
        }
    }

    fn leak(buffers: u32, bytes_each: u32) -> u32 {
        let allocate = |_| Buffer::<u8>::zeroed(bytes_each as usize).map(std::mem::forget).is_ok();
        (0..buffers).map_while(|n| allocate(n).then_some(())).count() as u32
    }

    fn raw_ptx() -> String {
        let run = || {
            let (kernels, out) = (Kernels::load(PTX)?, buffer(4)?);
            kernels.launch("k", ONE, &[(&out).into()])?.wait()?;
            out.to_vec()
        };
        match run() {
            Ok(numbers) => format!("it ran: {numbers:?}"),
            Err(error) => error.to_string(),
        }
    }

    fn not_wasm() -> String {
        text(Kernels::load(b"\x7fELF and more").map(drop))
    }

    fn large_module(bytes: u32) -> String {
        text(Kernels::load(&vec![0; bytes as usize]).map(drop))
    }

    fn no_such_kernel() -> String {
        text(launch("nothing", ONE, &[]).and_then(|launch| launch.wait()))
    }

    fn wrong_args() -> Vec<String> {
        let Ok(out) = buffer(1) else { return vec!["no buffer".to_owned()] };
        let out = Argument::from(&out);
        // What is right is a u32 and a buffer.
        let tries: [&[Argument<'_>]; 6] = [
            &[],
            &[1.into()],
            &[1.into(), out, out],
            &[1.0_f32.into(), out],
            &[1_u64.into(), out],
            &[1.into(), 1.into()],
        ];
        tries.iter().map(|arguments| text(launch("spin", ONE, arguments).and_then(|launch| launch.wait()))).collect()
    }

    fn beyond() -> Vec<String> {
        let (Ok(small), Ok(large)) = (buffer(4), buffer(8)) else { return vec!["no buffers".to_owned()] };
        vec![
            text(small.write(3, &[1, 2])),
            text(small.write(usize::MAX, &[1])),
            text(small.copy_from(0, &large, 0..8)),
            text(small.copy_from(4, &large, 0..1)),
            text(small.fill(0..5, 1)),
            text(small.read(0..5).map(drop)),
        ]
    }

    fn freed_while_running(rounds: u32) -> String {
        text(start(rounds, GROUP).and_then(|launch| launch.wait()))
    }

    fn spin(rounds: u32) -> String {
        text(spin(rounds, GROUP))
    }

    fn abandon(rounds: u32) -> String {
        text(start(rounds, GROUP).map(drop))
    }

    fn flood(launches_max: u32, rounds: u32) -> String {
        let flood = |launched: &mut u32| {
            let (kernels, out) = (Kernels::load(KERNELS)?, buffer(256)?);
            while *launched < launches_max {
                drop(kernels.launch("spin", GROUP, &[rounds.into(), (&out).into()])?);
                *launched += 1;
            }
            Ok(())
        };
        let mut launched = 0;
        let end = flood(&mut launched);
        format!("{launched} launches, then: {}", text(end))
    }

    fn trap_itself(rounds: u32) -> String {
        match start(rounds, GROUP) {
            Ok(_launch) => panic!("asked to, while the device works"),
            Err(error) => error.to_string(),
        }
    }

    fn hang_itself(rounds: u32) -> String {
        match start(rounds, GROUP) {
            Ok(_launch) => loop {
                std::hint::black_box(0);
            },
            Err(error) => error.to_string(),
        }
    }
}

fn text(outcome: Result<()>) -> String {
    match outcome {
        Ok(()) => "no error".to_owned(),
        Err(error) => error.to_string(),
    }
}

fn buffer(elements: usize) -> Result<Buffer<u32>> {
    Buffer::zeroed(elements)
}

fn launch(kernel: &str, grid: Grid, arguments: &[Argument<'_>]) -> Result<Launch> {
    Kernels::load(KERNELS)?.launch(kernel, grid, arguments)
}

/// A launch that takes its time. Its buffer and its kernels are dropped while it runs.
fn start(rounds: u32, grid: Grid) -> Result<Launch> {
    let out = buffer(256)?;
    launch("spin", grid, &[rounds.into(), (&out).into()])
}

fn spin(rounds: u32, grid: Grid) -> Result<()> {
    let (kernels, out) = (Kernels::load(KERNELS)?, buffer(256)?);
    kernels.launch("spin", grid, &[rounds.into(), (&out).into()])?.wait()
}

export!(Hostile);
