//! Functions that compute tensors: what the papers' examples call.

wit_bindgen::generate!({ world: "examples" });

use std::time::Instant;

use demo::tensors::types::Value as GivenValue;
use tensor_wasm_sdk::DeviceKind;
use tensor_wasm_sdk::tensor::{
    self, DType, Error, Model, Tensor, Value, compute, evaluate, gradient, load_safetensors, named,
};

struct Examples;

fn text(error: Error) -> String {
    error.to_string()
}

impl Guest for Examples {
    fn device() -> Result<String, String> {
        let info = tensor::device().map_err(text)?;
        let kind = match info.kind {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Cuda => "cuda",
        };
        Ok(format!("{} ({kind}), {} of {} bytes", info.name, info.memory_bytes_used, info.memory_bytes_max))
    }

    fn matmul_softmax(n: u32, a: Vec<f32>, b: Vec<f32>) -> Result<Vec<f32>, String> {
        let shape = [n as usize, n as usize];
        let (a, b) = (Tensor::from_slice(&a, &shape), Tensor::from_slice(&b, &shape));
        a.matmul(&b).softmax(-1).to_vec().map_err(text)
    }

    fn rounds(n: u32, seed: i64, times: u32) -> Result<(f32, Vec<u64>), String> {
        rounds(n as usize, seed, times).map_err(text)
    }

    fn mlp(x: Vec<f32>, hidden: u32, classes: u32, seed: i64) -> Result<Vec<f32>, String> {
        let (inputs, hidden, classes) = (x.len(), hidden as usize, classes as usize);
        let weights = |shape: [usize; 2], seed| Tensor::normal(&shape, seed, DType::F32) * 0.1;
        let x = Tensor::from_slice(&x, &[1, inputs]);
        let inner = (x.matmul(&weights([inputs, hidden], seed)) + 0.1).gelu();
        inner.matmul(&weights([hidden, classes], seed + 1)).softmax(-1).to_vec().map_err(text)
    }

    fn gradient(x: Vec<f64>) -> Result<Vec<f64>, String> {
        let x = Tensor::from_slice(&x, &[x.len()]).with_grad();
        let cubes = &x * &x * &x;
        gradient(&cubes.sum(), &[&x]).and_then(|gradients| gradients[0].to_vec()).map_err(text)
    }

    fn learn(steps: u32, rate: f64) -> Result<Vec<f64>, String> {
        learn(steps, rate).map_err(text)
    }

    fn evaluate(expression: String, inputs: Vec<Input>) -> Result<Numbers, String> {
        let inputs = tensors(&inputs)?;
        numbers(&evaluate(&expression, &borrowed(&inputs)))
    }

    fn apply(operation: String, arguments: Vec<Argument>, inputs: Vec<Input>) -> Result<Numbers, String> {
        let inputs = tensors(&inputs)?;
        let made = |text: &String| evaluate(text, &borrowed(&inputs));
        // What arguments borrow.
        let held: Vec<Vec<Tensor>> = arguments
            .iter()
            .map(|argument| match &argument.value {
                GivenValue::Tensor(text) => vec![made(text)],
                GivenValue::Tensors(texts) => texts.iter().map(made).collect(),
                _ => Vec::new(),
            })
            .collect();
        let mut given: Vec<tensor::Argument<'_>> = Vec::new();
        for (argument, held) in arguments.iter().zip(&held) {
            let value = match &argument.value {
                GivenValue::Tensor(_) => Value::Tensor(&held[0]),
                GivenValue::Tensors(_) => Value::Tensors(held.iter().collect()),
                GivenValue::Integer(value) => Value::Integer(*value),
                GivenValue::Number(value) => Value::Number(*value),
                GivenValue::Boolean(value) => Value::Bool(*value),
                GivenValue::Integers(values) => Value::Integers(values.clone()),
                GivenValue::Dtype(name) => Value::DType(dtype(name)?),
            };
            given.push(match &argument.name {
                Some(name) => named(name, value),
                None => value.into(),
            });
        }
        numbers(&tensor::apply(&operation, &given))
    }

    fn safetensors(data: Vec<u8>) -> Result<Vec<(String, f64)>, String> {
        let loaded = load_safetensors(&data).map_err(text)?;
        loaded.into_iter().map(|(name, tensor)| Ok((name, total(&tensor)?))).collect()
    }

    fn model(name: String) -> Result<Vec<(String, f64)>, String> {
        let model = Model::open(&name).map_err(text)?;
        model.names().into_iter().map(|name| Ok((name.clone(), total(&model.get(&name))?))).collect()
    }

    fn beside(n: u32) -> Result<(u64, f32), String> {
        let x = Tensor::uniform(&[n as usize, n as usize], 1, DType::F32);
        let product = x.matmul(&x).mean();
        let computing = compute(&[&product]).map_err(text)?;
        let done = computing.pollable();
        let mut count = 0;
        while !done.ready() {
            count += 1;
        }
        computing.wait().map_err(text)?;
        Ok((count, product.item().map_err(text)?))
    }

    fn large(rows: u32, columns: u32) -> Result<u64, String> {
        large(rows as usize, columns as usize).map_err(text)
    }
}

fn rounds(n: usize, seed: i64, times: u32) -> tensor::Result<(f32, Vec<u64>)> {
    let (a, b) = (Tensor::normal(&[n, n], seed, DType::F32), Tensor::normal(&[n, n], seed + 1, DType::F32));
    a.realize()?;
    b.realize()?;
    let (mut sum, mut took) = (0.0, Vec::new());
    for _ in 0..times {
        let began = Instant::now();
        let all: Vec<f32> = a.matmul(&b).softmax(-1).to_vec()?;
        took.push(began.elapsed().as_nanos() as u64);
        sum = all.rchunks_exact(n).next().map_or(0.0, |row| row.iter().sum());
    }
    Ok((sum, took))
}

fn learn(steps: u32, rate: f64) -> tensor::Result<Vec<f64>> {
    let x = Tensor::from_slice(&[-1.0_f64, 0.0, 1.0, 2.0], &[4]);
    let target = &x * 3.0 + 2.0;
    let (mut w, mut b) = (Tensor::zeros(&[], DType::F64), Tensor::zeros(&[], DType::F64));
    let mut last = 0.0;
    for _ in 0..steps {
        let (w_asked, b_asked) = (w.with_grad(), b.with_grad());
        let loss = (&x * &w_asked + &b_asked).mse_loss(&target);
        let gradients = gradient(&loss, &[&w_asked, &b_asked])?;
        (w, b) = (&w - &gradients[0] * rate, &b - &gradients[1] * rate);
        compute(&[&w, &b, &loss])?.wait()?;
        last = loss.item()?;
    }
    Ok(vec![w.item()?, b.item()?, last])
}

fn large(rows: usize, columns: usize) -> tensor::Result<u64> {
    let piece = |row: usize| -> Vec<i32> { (0..columns).map(|column| (row * columns + column) as i32).collect() };
    // As many rows as a host takes at once.
    let at_once = ((4 << 20) / columns).max(1);
    let mut pieces = Vec::new();
    for first in (0..rows).step_by(at_once) {
        let count = at_once.min(rows - first);
        let elements: Vec<i32> = (first..first + count).flat_map(piece).collect();
        pieces.push(Tensor::from_slice(&elements, &[count, columns]));
    }
    let whole = Tensor::concat(&pieces.iter().collect::<Vec<_>>(), 0).transpose();
    let turned: Vec<i32> = whole.to_vec()?;
    let differs = |(n, element): (usize, &i32)| *element as usize != n % rows * columns + n / rows;
    Ok(turned.iter().enumerate().filter(|each| differs(*each)).count() as u64)
}

fn dtype(name: &str) -> Result<DType, String> {
    let all = [
        ("bool", DType::Bool),
        ("u8", DType::U8),
        ("i32", DType::I32),
        ("i64", DType::I64),
        ("f16", DType::F16),
        ("bf16", DType::BF16),
        ("f32", DType::F32),
        ("f64", DType::F64),
    ];
    let found = all.iter().find(|(known, _)| *known == name);
    found.map(|(_, dtype)| *dtype).ok_or_else(|| format!("no type {name:?}"))
}

fn tensors(inputs: &[Input]) -> Result<Vec<(&str, Tensor)>, String> {
    let tensor = |input: &Numbers| -> Result<Tensor, String> {
        let shape: Vec<usize> = input.shape.iter().map(|size| *size as usize).collect();
        Ok(Tensor::from_slice(&input.data, &shape).cast(dtype(&input.dtype)?))
    };
    inputs.iter().map(|input| Ok((input.name.as_str(), tensor(&input.numbers)?))).collect()
}

fn borrowed<'a>(inputs: &'a [(&'a str, Tensor)]) -> Vec<(&'a str, &'a Tensor)> {
    inputs.iter().map(|(name, tensor)| (*name, tensor)).collect()
}

fn numbers(tensor: &Tensor) -> Result<Numbers, String> {
    let read = || {
        let dtype = format!("{:?}", tensor.dtype()?).to_lowercase();
        let shape = tensor.shape()?.into_iter().map(|size| size as u64).collect();
        Ok(Numbers { dtype, shape, data: tensor.cast(DType::F64).to_vec()? })
    };
    read().map_err(text)
}

fn total(tensor: &Tensor) -> Result<f64, String> {
    tensor.cast(DType::F64).sum().item().map_err(text)
}

export!(Examples);
