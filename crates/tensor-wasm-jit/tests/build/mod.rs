//! Kernels that a host builds: what they compute, that they are the same as from Wasm, and what the builder refuses.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tensor_wasm_jit::build::{
    AtomicOp, Axis, BinaryOp, BuildError, BuiltKernel, CARRIED_MAX, DEPTH_MAX, IdKind, KernelBuilder, MathFunction,
    TABLE_LABELS_MAX, UnaryOp, Value,
};
use tensor_wasm_jit::{Memory, OPS_MAX, Program, Refusal, SHARED_BYTES_MAX, TrapKind, Ty};

use super::host::Host;
use super::{Arg, Launched, assemble, bytes, compare_with_host, emulate, floats, read};

/// Compiles a kernel for both devices and runs it on both; they must agree.
fn launch(kernel: &BuiltKernel, groups: [u32; 3], items: [u32; 3], args: &[Arg]) -> Launched {
    let mut image = kernel.compile().unwrap();
    let size = |arg: &Arg| if let Arg::Buffer(bytes) = arg { bytes.len() as u64 } else { 0 };
    assemble(&image);
    if !image.fits(args.iter().map(size)) {
        image = kernel.compile_small().unwrap();
        assemble(&image);
    }
    let launched = emulate(&image, groups, items, args, 10_000_000_000);
    compare_with_host(&kernel.compile_host().unwrap(), groups, items, args, &launched);
    launched
}

/// `y[i] = a * x[i] + y[i]`
fn saxpy() -> Result<BuiltKernel, BuildError> {
    let mut b = KernelBuilder::new("saxpy");
    let (n, a) = (b.scalar(Ty::I32)?, b.scalar(Ty::F32)?);
    let (x, y) = (b.window()?, b.window()?);
    let i = b.id(IdKind::Global, Axis::X)?;
    let is_inside = b.binary(BinaryOp::I32LtU, i, n)?;
    b.begin_if(is_inside, &[])?;
    let (from, to) = (b.element(x, i, 4)?, b.element(y, i, 4)?);
    b.locate("the operand");
    let x = b.load(Ty::F32, from, 0)?;
    b.locate("the sum");
    let product = b.binary(BinaryOp::F32Mul, a, x)?;
    let old = b.load(Ty::F32, to, 0)?;
    let sum = b.binary(BinaryOp::F32Add, product, old)?;
    b.store(sum, to, 0)?;
    b.end()?;
    b.finish()
}

#[test]
fn a_trusted_kernel_has_no_fence_and_is_refused_where_it_would_need_one() {
    let kernel = saxpy().unwrap();
    let image = kernel.compile_trusted().unwrap();
    for fence in ["[control]", "max.u32 %worst0", "STOPPED", "[size2]"] {
        assert!(kernel.compile().unwrap().ptx.contains(fence), "{fence}");
        assert!(!image.ptx.contains(fence), "{fence}: {}", image.ptx);
    }
    // Four neighbours are moved at once, both ways, and a number that comes from memory says where from.
    let mut b = KernelBuilder::new("neighbours");
    let (from, to) = (b.window().unwrap(), b.window().unwrap());
    let i = b.id(IdKind::Global, Axis::X).unwrap();
    let (from, at) = (b.element(from, i, 16).unwrap(), b.element(to, i, 16).unwrap());
    let loaded: Vec<Value> = (0..4).map(|n| b.load(Ty::F32, from, 4 * n).unwrap()).collect();
    let sum = loaded.iter().map(|x| b.binary(BinaryOp::F32Add, *x, *x).unwrap()).collect::<Vec<Value>>();
    (0..4).zip(&sum).for_each(|(n, x)| b.store(*x, at, 4 * n).unwrap());
    let kernel = b.finish().unwrap();
    let image = kernel.compile_trusted().unwrap();
    assert!(image.ptx.contains("ld.global.v4.f32") && image.ptx.contains("st.global.v4.f32"), "{}", image.ptx);
    let emulator = tensor_wasm_jit::emulate::Emulator::new(&image.ptx).unwrap();
    assert_eq!(emulator.params(), [(0, 8), (8, 8)], "two addresses and nothing else");
    let mut memory = tensor_wasm_jit::emulate::DeviceMemory::default();
    let x = floats(3, 32);
    memory.add(0x1000, bytes(&x));
    memory.add(0x2000, vec![0xee; 128]);
    let params: Vec<u8> = [0x1000_u64, 0x2000].iter().flat_map(|address| address.to_le_bytes()).collect();
    emulator.run(&mut memory, &params, [2, 1, 1], [4, 1, 1]).unwrap();
    assert_eq!(read(memory.bytes(0x2000)), x.iter().map(|x| x + x).collect::<Vec<f32>>());
    // The fenced one stores them at once too.
    let args = [Arg::Buffer(bytes(&x)), Arg::Buffer(vec![0; 128])];
    let done = launch(&kernel, [2, 1, 1], [4, 1, 1], &args);
    assert_eq!(read(&done.buffers[1]), x.iter().map(|x| x + x).collect::<Vec<f32>>());
    assert!(kernel.compile().unwrap().ptx.contains("st.global.v4.f32"));
    // An address that may be of either window.
    let mut b = KernelBuilder::new("either");
    let (x, y) = (b.window().unwrap(), b.window().unwrap());
    let i = b.id(IdKind::Global, Axis::X).unwrap();
    let one = b.select(i, x, y).unwrap();
    b.store(i, one, 0).unwrap();
    let refusal = b.finish().unwrap().compile_trusted().unwrap_err().to_string();
    assert!(refusal.contains("without a fence"), "{refusal}");
}

#[test]
fn items_of_a_subgroup_exchange_what_they_have() {
    // Every item gets the sum of its subgroup, of each type, and the number of its neighbour.
    let mut b = KernelBuilder::new("sums");
    let to = b.window().unwrap();
    let i = b.id(IdKind::Global, Axis::X).unwrap();
    let wide = b.unary(UnaryOp::I64ExtendI32U, i).unwrap();
    let big = b.i64(1 << 40).unwrap();
    let wide = b.binary(BinaryOp::I64Mul, wide, big).unwrap();
    let single = b.unary(UnaryOp::F32ConvertI32U, i).unwrap();
    let double = b.unary(UnaryOp::F64ConvertI32U, i).unwrap();
    let adds = [BinaryOp::I32Add, BinaryOp::I64Add, BinaryOp::F32Add, BinaryOp::F64Add];
    let mut sums = [i, wide, single, double];
    for (sum, add) in sums.iter_mut().zip(adds) {
        for mask in [16, 8, 4, 2, 1] {
            let other = b.shuffle(*sum, mask).unwrap();
            *sum = b.binary(add, *sum, other).unwrap();
        }
    }
    let neighbour = b.shuffle(i, 1).unwrap();
    let at = b.element(to, i, 32).unwrap();
    b.store(sums[0], at, 0).unwrap();
    b.store(sums[2], at, 4).unwrap();
    b.store(sums[1], at, 8).unwrap();
    b.store(sums[3], at, 16).unwrap();
    b.store(neighbour, at, 24).unwrap();
    assert!(matches!(b.shuffle(i, 32), Err(BuildError::Structure { .. })));
    let kernel = b.finish().unwrap();
    let done = launch(&kernel, [2, 1, 1], [64, 1, 1], &[Arg::Buffer(vec![0; 128 * 32])]);
    assert_eq!(done.trap, None);
    for (n, item) in (0_u32..).zip(done.buffers[0].chunks(32)) {
        let first = n / 32 * 32;
        let sum: u32 = (first..first + 32).sum();
        let four = |at: usize| <[u8; 4]>::try_from(&item[at..at + 4]).unwrap();
        let eight = |at: usize| <[u8; 8]>::try_from(&item[at..at + 8]).unwrap();
        assert_eq!((u32::from_le_bytes(four(0)), f32::from_le_bytes(four(4))), (sum, sum as f32), "{n}");
        assert_eq!(u64::from_le_bytes(eight(8)), u64::from(sum) << 40, "{n}");
        assert_eq!((f64::from_le_bytes(eight(16)), u32::from_le_bytes(four(24))), (f64::from(sum), n ^ 1), "{n}");
    }
}

#[test]
fn what_is_stored_twice_stays_in_its_order() {
    let mut b = KernelBuilder::new("twice");
    let to = b.window().unwrap();
    let numbers: Vec<Value> = (1..=4).map(|n| b.i32(n).unwrap()).collect();
    // p, then q, then their neighbour: as a vector of the first p would win.
    for (n, at) in [(0, 1), (1, 1), (2, 0), (3, 3), (0, 2)] {
        b.store(numbers[n], to, 4 * at).unwrap();
    }
    let done = launch(&b.finish().unwrap(), [1; 3], [1; 3], &[Arg::Buffer(vec![0; 16])]);
    let words: Vec<u32> = done.buffers[0].chunks(4).map(|four| u32::from_le_bytes(four.try_into().unwrap())).collect();
    assert_eq!(words, [3, 2, 1, 4]);
    // The one between is of another type: as a vector, the float would be stored after it.
    let mut b = KernelBuilder::new("typed");
    let to = b.window().unwrap();
    let (float, number) = (b.f32(1.5).unwrap(), b.i32(7).unwrap());
    for (value, at) in [(float, 0), (number, 0), (float, 4)] {
        b.store(value, to, at).unwrap();
    }
    let done = launch(&b.finish().unwrap(), [1; 3], [1; 3], &[Arg::Buffer(vec![0; 8])]);
    assert_eq!(done.buffers[0], [7_u32.to_le_bytes(), 1.5_f32.to_le_bytes()].concat());
}

#[test]
fn a_saxpy_that_was_built_computes_what_rust_does() {
    let kernel = saxpy().unwrap();
    assert_eq!(kernel.windows(), [false, false, true, true]);
    for n in [0, 1, 63, 64, 1000] {
        let (x, y) = (floats(n, 1000), floats(n + 1, 1000));
        let args = [Arg::I32(n as i32), Arg::F32(1.5), Arg::Buffer(bytes(&x)), Arg::Buffer(bytes(&y))];
        let done = launch(&kernel, [16, 1, 1], [64, 1, 1], &args);
        assert_eq!(done.trap, None);
        let is_inside = |i: usize| (i as u64) < n;
        let expected: Vec<f32> = (0..1000).map(|i| if is_inside(i) { 1.5 * x[i] + y[i] } else { y[i] }).collect();
        assert_eq!(read(&done.buffers[1]), expected, "{n}");
    }
}

#[test]
fn a_trap_in_what_was_built_names_what_the_host_said() {
    let kernel = saxpy().unwrap();
    // The first is too short, so that the operand is outside; an empty one too.
    for len in [64, 0] {
        let args = [Arg::I32(64), Arg::F32(1.0), Arg::Buffer(vec![0; len]), Arg::Buffer(vec![0; 256])];
        let trap = launch(&kernel, [1, 1, 1], [64, 1, 1], &args).trap.unwrap();
        assert_eq!(trap.kind, TrapKind::OutOfBounds);
        assert_eq!(trap.place.as_ref().unwrap().to_string(), "in the operand", "{trap}");
        if len > 0 {
            assert_eq!(trap.outside.unwrap().0, Memory::Argument(2), "{trap}");
        }
    }
}

/// The sum of a group's items, in shared memory, halving how many take part.
fn reduction() -> Result<BuiltKernel, BuildError> {
    let mut b = KernelBuilder::new("sum");
    let (x, out) = (b.window()?, b.window()?);
    let shared = b.shared(4 * 128)?;
    let (i, item) = (b.id(IdKind::Global, Axis::X)?, b.id(IdKind::Local, Axis::X)?);
    let (from, own) = (b.element(x, i, 4)?, b.element(shared, item, 4)?);
    let value = b.load(Ty::F32, from, 0)?;
    b.store(value, own, 0)?;
    b.barrier()?;
    let one = b.i32(1)?;
    let size = b.id(IdKind::LocalSize, Axis::X)?;
    let half = b.binary(BinaryOp::I32ShrU, size, one)?;
    let half = b.variable(half)?;
    let done = b.begin_block(&[half])?;
    let again = b.begin_loop(&[half])?;
    let count = b.get(half)?;
    let is_done = b.unary(UnaryOp::I32Eqz, count)?;
    b.branch_if(is_done, done)?;
    let takes_part = b.binary(BinaryOp::I32LtU, item, count)?;
    b.begin_if(takes_part, &[])?;
    let other = b.element(own, count, 4)?;
    let (a, c) = (b.load(Ty::F32, own, 0)?, b.load(Ty::F32, other, 0)?);
    let sum = b.binary(BinaryOp::F32Add, a, c)?;
    b.store(sum, own, 0)?;
    b.end()?;
    b.barrier()?;
    let next = b.binary(BinaryOp::I32ShrU, count, one)?;
    b.set(half, next)?;
    b.branch(again)?;
    b.end()?;
    b.end()?;
    let is_first = b.unary(UnaryOp::I32Eqz, item)?;
    b.begin_if(is_first, &[])?;
    let group = b.id(IdKind::Group, Axis::X)?;
    let to = b.element(out, group, 4)?;
    let sum = b.load(Ty::F32, shared, 0)?;
    b.store(sum, to, 0)?;
    b.end()?;
    b.finish()
}

#[test]
fn a_reduction_that_was_built_meets_at_its_barriers() {
    let kernel = reduction().unwrap();
    for seed in 0..4 {
        let x = floats(seed, 5 * 128);
        let done = launch(&kernel, [5, 1, 1], [128, 1, 1], &[Arg::Buffer(bytes(&x)), Arg::Buffer(vec![0; 20])]);
        assert_eq!(done.trap, None);
        let mut expected = Vec::new();
        for group in x.chunks(128) {
            let mut sums = group.to_vec();
            let mut half = 64;
            while half > 0 {
                for i in 0..half {
                    sums[i] += sums[i + half];
                }
                half /= 2;
            }
            expected.push(sums[0]);
        }
        assert_eq!(read(&done.buffers[1]), expected);
    }
}

/// `c = a * b`, a work item for each element, with a counted loop.
fn matmul() -> Result<BuiltKernel, BuildError> {
    let mut b = KernelBuilder::new("matmul");
    let (n, x, y, out) = (b.scalar(Ty::I32)?, b.window()?, b.window()?, b.window()?);
    let (column, row) = (b.id(IdKind::Global, Axis::X)?, b.id(IdKind::Global, Axis::Y)?);
    let (is_column, is_row) = (b.binary(BinaryOp::I32LtU, column, n)?, b.binary(BinaryOp::I32LtU, row, n)?);
    let is_inside = b.binary(BinaryOp::I32And, is_column, is_row)?;
    b.begin_if(is_inside, &[])?;
    let start = b.binary(BinaryOp::I32Mul, row, n)?;
    let zero = b.f32(0.0)?;
    let sum = b.variable(zero)?;
    b.count_to(n, &[sum], |b, k| {
        let left = b.binary(BinaryOp::I32Add, start, k)?;
        let left = b.element(x, left, 4)?;
        let right = b.binary(BinaryOp::I32Mul, k, n)?;
        let right = b.binary(BinaryOp::I32Add, right, column)?;
        let right = b.element(y, right, 4)?;
        let (left, right, old) = (b.load(Ty::F32, left, 0)?, b.load(Ty::F32, right, 0)?, b.get(sum)?);
        let next = b.fma(left, right, old)?;
        b.set(sum, next)
    })?;
    let at = b.binary(BinaryOp::I32Add, start, column)?;
    let to = b.element(out, at, 4)?;
    let sum = b.get(sum)?;
    b.store(sum, to, 0)?;
    b.end()?;
    b.finish()
}

#[test]
fn a_matmul_that_was_built_computes_what_rust_does() {
    let kernel = matmul().unwrap();
    for n in [1_usize, 7, 16, 33] {
        let (x, y) = (floats(n as u64, n * n), floats(n as u64 + 100, n * n));
        let args =
            [Arg::I32(n as i32), Arg::Buffer(bytes(&x)), Arg::Buffer(bytes(&y)), Arg::Buffer(vec![0; 4 * n * n])];
        let done = launch(&kernel, [5, 5, 1], [8, 8, 1], &args);
        assert_eq!(done.trap, None);
        let element =
            |row: usize, column: usize| (0..n).fold(0.0_f32, |sum, k| x[row * n + k].mul_add(y[k * n + column], sum));
        let expected: Vec<f32> = (0..n * n).map(|at| element(at / n, at % n)).collect();
        assert_eq!(read(&done.buffers[2]), expected, "{n}");
    }
    // A counted loop: what it reads along a row is checked before it.
    assert!(kernel.compile().unwrap().ptx.contains("\nG"), "there is a copy of the loop without a fence");
}

#[test]
fn every_operation_can_be_built() {
    // All of them on the same operands, each result stored: what the CPU computes is what the emulator does.
    let mut b = KernelBuilder::new("all");
    let out = b.window().unwrap();
    let params: Vec<Value> = [Ty::I32, Ty::F32].into_iter().map(|ty| b.scalar(ty).unwrap()).collect();
    let (i, f) = (params[0], params[1]);
    let (l, d) = (b.unary(UnaryOp::I64ExtendI32S, i).unwrap(), b.unary(UnaryOp::F64PromoteF32, f).unwrap());
    let of = |ty: Ty| match ty {
        Ty::I32 => i,
        Ty::I64 => l,
        Ty::F32 => f,
        Ty::F64 => d,
    };
    let mut at = 0;
    let mut put = |b: &mut KernelBuilder, value: Value| {
        b.store(value, out, at).unwrap();
        at += 8;
    };
    for op in UnaryOp::ALL {
        let value = b.unary(*op, of(op.from())).unwrap();
        put(&mut b, value);
    }
    for op in BinaryOp::ALL {
        let value = b.binary(*op, of(op.from()), of(op.from())).unwrap();
        put(&mut b, value);
    }
    for x in [f, d] {
        for function in MathFunction::ALL {
            let operands = vec![x; function.operands()];
            let value = b.math(function, &operands).unwrap();
            put(&mut b, value);
        }
        let value = b.fma(x, x, x).unwrap();
        put(&mut b, value);
    }
    let value = b.rsqrt(d).unwrap();
    put(&mut b, value);
    for kind in [IdKind::Global, IdKind::Local, IdKind::Group, IdKind::LocalSize, IdKind::GlobalSize, IdKind::Groups] {
        for axis in Axis::ALL {
            let value = b.id(kind, axis).unwrap();
            put(&mut b, value);
        }
    }
    for (ty, bytes) in [(Ty::I32, 1), (Ty::I32, 2), (Ty::I64, 1), (Ty::I64, 2), (Ty::I64, 4)] {
        for is_signed in [false, true] {
            let value = b.load_narrow(ty, bytes, is_signed, out, 3).unwrap();
            put(&mut b, value);
        }
        b.store_narrow(bytes, of(ty), out, 5).unwrap();
    }
    let ops = [AtomicOp::Add, AtomicOp::Sub, AtomicOp::And, AtomicOp::Or, AtomicOp::Xor, AtomicOp::Exchange];
    for (value, ty) in [(i, Ty::I32), (l, Ty::I64)] {
        for op in ops {
            let old = b.atomic(op, value, out, 16).unwrap();
            put(&mut b, old);
        }
        let old = b.compare_exchange(value, value, out, 16).unwrap();
        put(&mut b, old);
        b.atomic_store(4, value, out, 24).unwrap();
        b.fence().unwrap();
        let now = b.atomic_load(ty, 4, out, 24).unwrap();
        put(&mut b, now);
    }
    let kernel = b.finish().unwrap();
    for (i, f) in [(7, 2.5), (-3, 0.75), (1 << 20, 12.0)] {
        let args = [Arg::Buffer(vec![0; 8 * 300]), Arg::I32(i), Arg::F32(f)];
        assert_eq!(launch(&kernel, [1; 3], [1; 3], &args).trap, None, "{i}, {f}");
    }
    let args = [Arg::Buffer(vec![0; 8 * 300]), Arg::I32(0), Arg::F32(1.0)];
    assert_eq!(launch(&kernel, [1; 3], [1; 3], &args).trap.unwrap().kind, TrapKind::DivideByZero);
}

#[test]
fn branches_and_variables_take_the_path_that_was_taken() {
    // By a table into three cases; both sides of an `if`; out of a loop in the middle; the rest ends early.
    let mut b = KernelBuilder::new("paths");
    let out = b.window().unwrap();
    let i = b.id(IdKind::Local, Axis::X).unwrap();
    let (zero, one, ten) = (b.i32(0).unwrap(), b.i32(1).unwrap(), b.i32(10).unwrap());
    let (x, y) = (b.variable(zero).unwrap(), b.variable(one).unwrap());
    let all = b.begin_block(&[x, y]).unwrap();
    let two = b.begin_block(&[x]).unwrap();
    let first = b.begin_block(&[]).unwrap();
    b.branch_table(i, &[first, two], all).unwrap();
    b.end().unwrap();
    let hundred = b.i32(100).unwrap();
    b.set(x, hundred).unwrap();
    b.end().unwrap();
    // Swapped, as registers: both are read before either is written.
    let again = b.begin_loop(&[x, y]).unwrap();
    let (a, c) = (b.get(x).unwrap(), b.get(y).unwrap());
    let sum = b.binary(BinaryOp::I32Add, a, one).unwrap();
    b.set(x, c).unwrap();
    b.set(y, sum).unwrap();
    let is_less = b.binary(BinaryOp::I32LtS, c, ten).unwrap();
    b.branch_if(is_less, again).unwrap();
    b.end().unwrap();
    b.end().unwrap();
    let four = b.i32(4).unwrap();
    let is_four = b.binary(BinaryOp::I32Eq, i, four).unwrap();
    b.begin_if(is_four, &[x]).unwrap();
    b.finish_item().unwrap();
    b.otherwise().unwrap();
    let (a, c) = (b.get(x).unwrap(), b.get(y).unwrap());
    let sum = b.binary(BinaryOp::I32Mul, a, ten).unwrap();
    let sum = b.binary(BinaryOp::I32Add, sum, c).unwrap();
    b.set(x, sum).unwrap();
    b.end().unwrap();
    let at = b.element(out, i, 4).unwrap();
    let x = b.get(x).unwrap();
    b.store(x, at, 0).unwrap();
    let kernel = b.finish().unwrap();
    let done = launch(&kernel, [1; 3], [6, 1, 1], &[Arg::Buffer(vec![0xff; 24])]);
    assert_eq!(done.trap, None);
    let oracle = |i: i32| {
        let (mut x, mut y) = (0, 1);
        if i < 2 {
            x = if i == 0 { 100 } else { x };
            loop {
                let c = y;
                (x, y) = (c, x + 1);
                if c >= 10 {
                    break;
                }
            }
        }
        if i == 4 { -1 } else { x * 10 + y }
    };
    let found: Vec<i32> = done.buffers[0].chunks(4).map(|four| i32::from_le_bytes(four.try_into().unwrap())).collect();
    assert_eq!(found, (0..6).map(oracle).collect::<Vec<i32>>());
}

/// A place in the source for each operation, as an instruction has, so that both number them alike.
fn located(b: &mut KernelBuilder, n: &mut u32) {
    *n += 1;
    b.locate(&n.to_string());
}

#[test]
fn what_is_built_is_what_wasm_lowers_to() {
    let wasm = wat::parse_str(
        r#"(module (import "kernel" "global_id" (func $id (param i32) (result i32)))
          (memory 1)
          (func (export "k") (param $p i32) (param $n i32) (param $sum f32)
            (if (i32.lt_u (call $id (i32.const 0)) (local.get $n))
              (then
                (loop $l
                  (local.set $sum (f32.add (local.get $sum) (f32.load offset=8 (local.get $p))))
                  (local.set $p (i32.add (local.get $p) (i32.const 4)))
                  (br_if $l (local.tee $n (i32.sub (local.get $n) (i32.const 1)))))
                (f32.store (local.get $p) (local.get $sum))))))"#,
    )
    .unwrap();
    let program = Program::read(&wasm).unwrap();
    let expected = program.compile("k", &[true, false, false]).unwrap();
    let build = || -> Result<BuiltKernel, BuildError> {
        let (mut b, mut n) = (KernelBuilder::new("k"), 0);
        let (p, count, sum) = (b.window()?, b.scalar(Ty::I32)?, b.scalar(Ty::F32)?);
        // The dimension is an operand in Wasm, and stays a constant that nobody reads.
        b.i32(0)?;
        let id = b.id(IdKind::Global, Axis::X)?;
        located(&mut b, &mut n);
        let is_inside = b.binary(BinaryOp::I32LtU, id, count)?;
        // In the order of Wasm's locals.
        let all = [b.variable(p)?, b.variable(count)?, b.variable(sum)?];
        let [p, count, sum] = all;
        b.begin_if(is_inside, &all)?;
        let again = b.begin_loop(&all)?;
        located(&mut b, &mut n);
        let (old, at) = (b.get(sum)?, b.get(p)?);
        let loaded = b.load(Ty::F32, at, 8)?;
        located(&mut b, &mut n);
        let next = b.binary(BinaryOp::F32Add, old, loaded)?;
        b.set(sum, next)?;
        let (at, four) = (b.get(p)?, b.i32(4)?);
        located(&mut b, &mut n);
        let next = b.binary(BinaryOp::I32Add, at, four)?;
        b.set(p, next)?;
        let (left, one) = (b.get(count)?, b.i32(1)?);
        located(&mut b, &mut n);
        let next = b.binary(BinaryOp::I32Sub, left, one)?;
        b.set(count, next)?;
        b.branch_if(next, again)?;
        b.end()?;
        let (at, value) = (b.get(p)?, b.get(sum)?);
        located(&mut b, &mut n);
        b.store(value, at, 0)?;
        b.end()?;
        b.finish()
    };
    let kernel = build().unwrap();
    let built = kernel.compile().unwrap();
    assert_eq!(built.ptx, expected.ptx);
    assert_eq!(built.window_bytes_min, expected.window_bytes_min);
    assert_eq!(built.sites.len(), expected.sites.len());
    let host = program.compile_host("k", &[true, false, false]).unwrap();
    assert_eq!(kernel.compile_host().unwrap().wasm, host.wasm);
    let small = program.compile_small("k", &[true, false, false]).unwrap();
    assert_eq!(kernel.compile_small().unwrap().ptx, small.ptx);
}

#[test]
fn misuse_of_a_builder_is_an_error() {
    let mut b = KernelBuilder::new("k");
    let mut other = KernelBuilder::new("other");
    let (p, x) = (b.window().unwrap(), b.scalar(Ty::F32).unwrap());
    let foreign = other.scalar(Ty::I32).unwrap();
    let foreign_variable = other.variable(foreign).unwrap();
    let foreign_block = other.begin_block(&[]).unwrap();
    let structure =
        |error: Result<(), BuildError>| assert!(matches!(error, Err(BuildError::Structure { .. })), "{error:?}");
    let unreachable =
        |error: Result<(), BuildError>| assert!(matches!(error, Err(BuildError::Unreachable { .. })), "{error:?}");
    let wrong = |error: Result<(), BuildError>| {
        assert!(matches!(error, Err(BuildError::Type { .. } | BuildError::NoSuchType { .. })), "{error:?}");
    };
    // Of another builder.
    assert_eq!(b.unary(UnaryOp::I32Clz, foreign), Err(BuildError::Foreign));
    assert_eq!(b.get(foreign_variable), Err(BuildError::Foreign));
    assert_eq!(b.set(foreign_variable, p), Err(BuildError::Foreign));
    assert_eq!(b.branch(foreign_block), Err(BuildError::Foreign));
    assert_eq!(b.begin_block(&[foreign_variable]), Err(BuildError::Foreign));
    // Types.
    wrong(b.unary(UnaryOp::F64Sqrt, x).map(drop));
    wrong(b.binary(BinaryOp::I32Add, p, x).map(drop));
    wrong(b.binary(BinaryOp::F32Add, p, x).map(drop));
    wrong(b.select(x, p, p).map(drop));
    wrong(b.select(p, p, x).map(drop));
    wrong(b.fma(p, p, p).map(drop));
    wrong(b.rsqrt(p).map(drop));
    wrong(b.math(MathFunction::Sin, &[p]).map(drop));
    wrong(b.math(MathFunction::Pow, &[x, p]).map(drop));
    wrong(b.load(Ty::I32, x, 0).map(drop));
    wrong(b.store(x, x, 0));
    wrong(b.begin_if(x, &[]).map(drop));
    wrong(b.atomic(AtomicOp::Add, x, p, 0).map(drop));
    wrong(b.atomic_load(Ty::F32, 4, p, 0).map(drop));
    assert!(matches!(b.math(MathFunction::Pow, &[x]), Err(BuildError::Operands { expected: 2, found: 1, .. })));
    assert!(matches!(b.math(MathFunction::Exp, &[]), Err(BuildError::Operands { expected: 1, found: 0, .. })));
    assert!(matches!(b.atomic(AtomicOp::CompareExchange, p, p, 0), Err(BuildError::Operands { .. })));
    for (ty, bytes) in [(Ty::I32, 0), (Ty::I32, 3), (Ty::I32, 8), (Ty::F32, 2), (Ty::F64, 4), (Ty::I64, u32::MAX)] {
        assert_eq!(b.load_narrow(ty, bytes, true, p, 0), Err(BuildError::Width { ty, bytes }));
    }
    assert_eq!(b.store_narrow(8, p, p, 0), Err(BuildError::Width { ty: Ty::I32, bytes: 8 }));
    assert_eq!(b.atomic_store(2, p, p, 0), Err(BuildError::Width { ty: Ty::I32, bytes: 2 }));
    structure(b.element(p, p, 12).map(drop));
    structure(b.element(p, p, 0).map(drop));
    // Structure.
    structure(b.end());
    structure(b.otherwise());
    let one = b.i32(1).unwrap();
    structure(b.window().map(drop));
    let variable = b.variable(one).unwrap();
    structure(b.begin_block(&[variable, variable]).map(drop));
    wrong(b.set(variable, x));
    let block = b.begin_block(&[]).unwrap();
    assert_eq!(b.set(variable, one), Err(BuildError::NotCarried));
    let inside = b.i32(2).unwrap();
    let inside_variable = b.variable(inside).unwrap();
    structure(b.otherwise());
    b.branch(block).unwrap();
    unreachable(b.i32(1).map(drop));
    unreachable(b.store(one, p, 0));
    unreachable(b.branch(block));
    unreachable(b.begin_loop(&[]).map(drop));
    b.end().unwrap();
    assert_eq!(b.unary(UnaryOp::I32Clz, inside), Err(BuildError::OutOfScope));
    assert_eq!(b.get(inside_variable), Err(BuildError::OutOfScope));
    structure(b.branch(block));
    structure(b.branch_table(one, &[], block));
    // One side of an `if` does not see the other's.
    b.begin_if(one, &[variable]).unwrap();
    let here = b.i32(3).unwrap();
    b.set(variable, here).unwrap();
    b.otherwise().unwrap();
    assert_eq!(b.set(variable, here), Err(BuildError::OutOfScope));
    structure(b.otherwise());
    b.end().unwrap();
    assert!(b.get(variable).is_ok());
    // A trap and a return end a path too; the builder can be used after all of this.
    b.begin_if(one, &[]).unwrap();
    b.trap().unwrap();
    unreachable(b.barrier());
    b.end().unwrap();
    b.store(one, p, 0).unwrap();
    assert!(b.finish().is_ok());
    let mut b = KernelBuilder::new("open");
    b.begin_loop(&[]).unwrap();
    structure(b.finish().map(drop));
    // A kernel of nothing.
    assert!(KernelBuilder::new("").finish().unwrap().compile().is_ok());
}

#[test]
fn limits_of_a_builder_are_errors() {
    let limit = |error: Result<(), BuildError>, max: usize| match error {
        Err(BuildError::Limit { max: found, .. }) => assert_eq!(found, max),
        other => panic!("{other:?}"),
    };
    let mut b = KernelBuilder::new(&"long".repeat(1000));
    limit((0..1000).try_for_each(|_| b.window().map(drop)), 128);
    limit((0..100_000).try_for_each(|_| b.i32(0).map(drop).and_then(|()| b.fence())), OPS_MAX);
    limit(b.finish().map(drop), OPS_MAX);
    let mut b = KernelBuilder::new("k");
    b.shared(SHARED_BYTES_MAX).unwrap();
    limit(b.shared(1).map(drop), SHARED_BYTES_MAX as usize);
    limit(b.shared(u32::MAX).map(drop), SHARED_BYTES_MAX as usize);
    limit((0..2000).try_for_each(|_| b.barrier()), 1000);
    limit((0..2000).try_for_each(|_| b.begin_block(&[]).map(drop)), DEPTH_MAX);
    let mut b = KernelBuilder::new("k");
    let zero = b.i32(0).unwrap();
    let block = b.begin_block(&[]).unwrap();
    limit(b.branch_table(zero, &vec![block; TABLE_LABELS_MAX], block), TABLE_LABELS_MAX);
    let variables: Vec<_> = (0..10_000).map(|_| b.variable(zero).unwrap()).collect();
    let carry = |b: &mut KernelBuilder| b.begin_block(&variables).map(drop).and_then(|()| b.end());
    match (0..1000).try_for_each(|_| carry(&mut b)) {
        Err(BuildError::Limit { max, .. }) => assert!(max == CARRIED_MAX || max == OPS_MAX),
        other => panic!("{other:?}"),
    }
    // What the device's assembler would take minutes for is refused as it is for Wasm.
    let mut b = KernelBuilder::new("wide");
    let p = b.window().unwrap();
    let mut values: Vec<Value> = (0..400).map(|n| b.load(Ty::I32, p, 4 * n).unwrap()).collect();
    let mut rng = StdRng::seed_from_u64(1);
    for _ in 0..20_000 {
        let (x, y) = (rng.random_range(0..400), rng.random_range(0..400));
        values[x] = b.binary(BinaryOp::I32Add, values[x], values[y]).unwrap();
    }
    for (n, value) in values.iter().enumerate() {
        b.store(*value, p, 4 * n as u32).unwrap();
    }
    let refused = b.finish().map(drop).unwrap_err();
    assert!(matches!(refused, BuildError::Refused(Refusal::TooManyValues { .. })), "{refused}");
}

#[test]
fn whatever_is_called_in_any_order_never_panics() {
    // A builder at the hands of chance: most calls are refused, and what is left over compiles.
    let host = Host::new();
    for seed in 0..200 {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut b = KernelBuilder::new("chance");
        let mut values: Vec<Value> = (0..3).filter_map(|_| b.window().ok()).collect();
        values.extend(b.scalar(Ty::F32).ok());
        let (mut variables, mut labels) = (Vec::new(), Vec::new());
        let mut open = 0;
        for _ in 0..300 {
            let value = |rng: &mut StdRng| values[rng.random_range(0..values.len())];
            let (x, y, z) = (value(&mut rng), value(&mut rng), value(&mut rng));
            let made = match rng.random_range(0..18) {
                0 => b.i32(rng.random()).ok(),
                1 => b.f32(rng.random()).ok(),
                2 | 3 => b.binary(BinaryOp::ALL[rng.random_range(0..BinaryOp::ALL.len())], x, y).ok(),
                4 => b.unary(UnaryOp::ALL[rng.random_range(0..UnaryOp::ALL.len())], x).ok(),
                5 => b.select(x, y, z).ok(),
                6 => b.load(Ty::I32, x, rng.random_range(0..64)).ok(),
                7 => b.store(x, y, rng.random_range(0..64)).ok().and(None),
                8 => b.variable(x).ok().and_then(|variable| {
                    variables.push(variable);
                    None
                }),
                9 | 10 if !variables.is_empty() => {
                    let variable = variables[rng.random_range(0..variables.len())];
                    let _ = b.set(variable, x);
                    b.get(variable).ok()
                }
                11 | 12 => {
                    let carried: Vec<_> = variables.iter().copied().filter(|_| rng.random()).collect();
                    let opened = match rng.random_range(0..3) {
                        0 => b.begin_block(&carried),
                        1 => b.begin_loop(&carried),
                        _ => b.begin_if(x, &carried),
                    };
                    open += usize::from(opened.is_ok());
                    labels.extend(opened.ok());
                    None
                }
                13 => {
                    open -= usize::from(b.end().is_ok());
                    None
                }
                14 => b.otherwise().ok().and(None),
                15 | 16 if !labels.is_empty() => {
                    let label = labels[rng.random_range(0..labels.len())];
                    let _ = if rng.random() { b.branch_if(x, label) } else { b.branch(label) };
                    None
                }
                _ => b.id(IdKind::Global, Axis::Y).ok(),
            };
            values.extend(made);
        }
        for _ in 0..open {
            b.end().unwrap();
        }
        let kernel = b.finish().unwrap();
        let image = kernel.compile().unwrap();
        // Assembling takes a second.
        if seed < 5 {
            assemble(&image);
        }
        host.compile(&kernel.compile_host().unwrap());
    }
}
