//! A component that misuses tensors, one way for each function.

wit_bindgen::generate!({ world: "hostile" });

use std::fmt::Display;

use tensor_wasm_sdk::tensor::{
    Computation, DType, Model, Result, Tensor, apply, compute, evaluate, gradient, load_safetensors, named,
};

struct Hostile;

/// What came of it.
fn text<T>(done: Result<T>) -> String {
    match done {
        Ok(_) => "no error".to_owned(),
        Err(error) => error.to_string(),
    }
}

fn ended(count: impl Display, error: impl Display) -> String {
    format!("{count}, then: {error}")
}

fn ones(n: u32) -> Tensor {
    Tensor::ones(&[n as usize, n as usize], DType::F32)
}

/// Products one after the other, each of the last.
fn products(n: u32, times: u32) -> Tensor {
    let x = ones(n);
    (0..times).fold(x.clone(), |product, _| product.matmul(&x) / n as f32)
}

fn begin(n: u32, times: u32) -> Result<Computation> {
    compute(&[&products(n, times).sum()])
}

impl Guest for Hostile {
    fn chain(operations: u32, with_grad: bool) -> String {
        let mut x = Tensor::zeros(&[4], DType::F64);
        if with_grad {
            x = x.with_grad();
        }
        for n in 0..operations {
            x = x + 1.0;
            if let Err(error) = x.check() {
                return ended(n, error);
            }
        }
        match x.to_vec::<f64>() {
            Ok(all) => format!("{all:?}"),
            Err(error) => error.to_string(),
        }
    }

    fn hoard_tensors() -> String {
        let mut all = Vec::new();
        loop {
            let one = Tensor::from_slice(&[1_u8], &[1]);
            match one.check() {
                Ok(()) => all.push(one),
                Err(error) => return ended(all.len(), error),
            }
        }
    }

    fn wide(operations: u32) -> String {
        let x = Tensor::ones(&[16], DType::F32);
        let parts: Vec<Tensor> = (0..operations).map(|n| (&x * n as f32).exp()).collect();
        match Tensor::stack(&parts.iter().collect::<Vec<_>>(), 0).min().item::<f32>() {
            Ok(least) => format!("{least}"),
            Err(error) => error.to_string(),
        }
    }

    fn absurd_sizes() -> Vec<String> {
        let (side, one) = (1_i64 << 20, Tensor::ones(&[1], DType::F32));
        let sides: &[i64] = &[side, side];
        let tries = [
            apply("zeros", &[sides.into()]),
            apply("ones", &[(&[i64::MAX, i64::MAX][..]).into()]),
            apply("zeros", &[(&[-1_i64][..]).into()]),
            one.apply("expand", &[sides.into()]),
            one.apply("repeat", &[(&[1_i64 << 40][..]).into()]),
            apply("eye", &[(1_i64 << 40).into()]),
            apply("arange", &[0.0.into(), f64::NAN.into()]),
            apply("arange", &[0.0.into(), 1e12.into()]),
            apply("arange", &[0.0.into(), 1.0.into(), named("step", 0.0)]),
            apply("linspace", &[0.0.into(), 1.0.into(), named("count", f64::NAN)]),
            apply("zeros", &[f64::NAN.into()]),
            apply("uniform", &[(&[1_i64 << 60][..]).into()]),
            Tensor::from_slice(&[1_u8; 8], &[1 << 20, 1 << 11]),
            one.apply("pad", &[(&[1_i64 << 40][..]).into(), (&[0_i64][..]).into()]),
            evaluate("zeros([1048576, 1048576]).sum()", &[]),
        ];
        tries.into_iter().map(|tensor| text(tensor.realize())).collect()
    }

    fn wrong_calls() -> Vec<String> {
        let (x, whole) = (Tensor::ones(&[2, 3], DType::F32), Tensor::ones(&[2, 3], DType::I64));
        let mut all: Vec<String> = [
            apply("no_such_thing", &[]),
            apply(&"long".repeat(1 << 16), &[]),
            x.apply("softmax", &[named("axes", 1)]),
            x.apply("softmax", &[named("axis", 7)]),
            x.apply("softmax", &[named("axis", 0.5)]),
            x.apply("add", &[]),
            x.apply("add", &[(&x).into(), (&x).into()]),
            &x + &whole,
            &x + &Tensor::ones(&[4], DType::F32),
            x.matmul(&x),
            whole.exp(),
            x.reshape(&[7]),
            Tensor::from_bytes(&[0; 7], &[2], DType::F32),
            Tensor::from_bytes(&[0; 8], &[3], DType::F32),
            Tensor::from_bytes(&[2], &[1], DType::Bool),
            Tensor::from_bytes(&[0; 1], &[1; 9], DType::U8),
            whole.with_grad(),
            evaluate("x +", &[("x", &x)]),
            evaluate(&"(".repeat(1000), &[]),
            evaluate(&"-".repeat(1 << 17), &[]),
        ]
        .iter()
        .map(|tensor| text(tensor.check()))
        .collect();
        // What only computing shows.
        all.push(text((&whole / &(&whole - 1)).realize()));
        all.push(text(
            x.apply("index_select", &[0.into(), (&(&whole.slice(1, 0, 1).reshape(&[2]) + 7)).into()]).realize(),
        ));
        all.push(text(gradient(&x, &[&x])));
        all.push(text(gradient(&x.sum(), &[&x])));
        all.push(text(load_safetensors(b"not such a file")));
        all.push(text(load_safetensors(&[&u64::MAX.to_le_bytes()[..], b"{}"].concat())));
        all.push(text(load_safetensors(&large_header())));
        all.push(text(Model::open("nobody gave me this")));
        all
    }

    fn long_lists() -> Vec<String> {
        let x = ones(2);
        let many = vec![&x; 5000];
        let numbers = vec![1_i64; 5000];
        let named_by: Vec<(&str, &Tensor)> = many[..300].iter().map(|tensor| ("x", *tensor)).collect();
        let long = "n".repeat(1000);
        let mut all: Vec<String> = [
            apply("concat", &[(&many[..]).into()]),
            x.apply("reshape", &[numbers[..].into()]),
            x.apply("add", &vec![(&x).into(); 300]),
            x.apply("softmax", &[named(&long, 1)]),
            apply(&long, &[]),
            x.reshape(&[1; 5000]),
            evaluate("x", &named_by),
            evaluate("x", &[(&long, &x)]),
        ]
        .iter()
        .map(|tensor| text(tensor.check()))
        .collect();
        all.push(text(gradient(&x.sum(), &many)));
        all.push(text(compute(&many)));
        all
    }

    fn hoard_bytes(bytes_each: u64) -> String {
        let mut all = Vec::new();
        loop {
            let one = Tensor::ones(&[bytes_each as usize], DType::U8).apply("contiguous", &[]);
            match one.realize() {
                Ok(()) => all.push(one),
                Err(error) => return ended(all.len() as u64 * bytes_each, error),
            }
        }
    }

    fn large_plan(n: u64) -> String {
        let x = Tensor::arange(0.0, n as f64, 1.0, DType::F32);
        let all = (x.unsqueeze(0) * x.unsqueeze(1)).apply("cumsum", &[named("axis", 0)]);
        text(all.realize())
    }

    fn products(n: u32, times: u32) -> String {
        match products(n, times).mean().item::<f32>() {
            Ok(mean) => format!("{mean}"),
            Err(error) => error.to_string(),
        }
    }

    fn dropped_while_running(n: u32, times: u32) -> String {
        // Nothing of it is held but the computation.
        text(begin(n, times).and_then(|computation| computation.wait()))
    }

    fn abandon(n: u32, times: u32) -> String {
        text(begin(n, times).map(std::mem::forget))
    }

    fn flood(n: u32) -> String {
        let mut all = Vec::new();
        loop {
            match begin(n, 8) {
                Ok(computation) => all.push(computation),
                Err(error) => return ended(all.len(), error),
            }
        }
    }

    fn trap_itself(n: u32, times: u32) -> String {
        std::mem::forget(begin(n, times));
        panic!("on purpose")
    }

    fn hang_itself(n: u32, times: u32) -> String {
        std::mem::forget(begin(n, times));
        loop {
            std::hint::spin_loop();
        }
    }
}

/// A file of names, and nothing else.
fn large_header() -> Vec<u8> {
    let entries: Vec<String> = (0..30_000)
        .map(|n| format!("\"name {n}\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}"))
        .collect();
    let header = format!("{{{}}}", entries.join(","));
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()
}

export!(Hostile);
