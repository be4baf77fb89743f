//! Where the time goes between asking for a small result on a GPU and having it on the host.

use std::time::Instant;

use tensor_wasm_tensor::nn::{Linear, Module, Sequential, function};
use tensor_wasm_tensor::{CudaDevice, DType, Device, Optimizer, Sgd, Tensor, graphs_made, set_device};

use crate::decode::Decoder;
use crate::tensors::middle;

const ROUNDS: usize = 400;

/// The median in microseconds of what is between `before` and `after`.
fn median<S>(
    mut before: impl FnMut() -> anyhow::Result<S>,
    mut run: impl FnMut(S) -> anyhow::Result<()>,
) -> anyhow::Result<f64> {
    let mut times = Vec::with_capacity(ROUNDS);
    for n in 0..ROUNDS + 20 {
        let state = before()?;
        let begun = Instant::now();
        run(state)?;
        if n >= 20 {
            times.push(begun.elapsed().as_nanos() as f64 / 1e3);
        }
    }
    Ok(middle(&mut times))
}

fn of_rows(rows: usize, cuda: &CudaDevice, device: &Device) -> anyhow::Result<()> {
    let x = Tensor::normal(&[rows, 10], 1, DType::F32).to(device);
    x.realize()?;
    let make = || x.log_softmax(1);
    let quiet = || cuda.synchronize().map_err(anyhow::Error::from);
    let graph = median(quiet, |()| {
        std::hint::black_box(make());
        Ok(())
    })?;
    let send = median(|| quiet().map(|()| make()), |made| Ok(made.realize()?))?;
    let wait = median(
        || quiet().map(|()| make()),
        |made| {
            made.realize()?;
            quiet()
        },
    )?;
    let realized = || {
        let made = make();
        made.realize()?;
        quiet()?;
        Ok(made)
    };
    let read = median(realized, |made| Ok(made.to_vec::<f32>().map(drop)?))?;
    let whole = median(quiet, |()| Ok(make().to_vec::<f32>().map(drop)?))?;
    println!("log_softmax {rows}x10, {} bytes of result:", rows * 40);
    println!("  the graph                      {graph:8.2} µs");
    println!("  the plan found and sent        {send:8.2} µs");
    println!("  sent and waited for            {wait:8.2} µs");
    println!("  read, once it is computed      {read:8.2} µs");
    println!("  all of it, from call to Vec    {whole:8.2} µs");
    Ok(())
}

fn of_training(cuda: &CudaDevice, device: &Device) -> anyhow::Result<()> {
    let model =
        Sequential::new().then(Linear::new(784, 128, 1)).then(function(|x| x.relu())).then(Linear::new(128, 10, 2));
    let mut optimizer = Sgd::with_momentum(&model.parameters(), 0.01, 0.9, false);
    let images = Tensor::normal(&[64, 784], 3, DType::F32).to(device);
    let labels = Tensor::from_vec((0..64_i64).map(|n| n % 10).collect::<Vec<_>>(), &[64]);
    let before = graphs_made();
    let quiet = || cuda.synchronize().map_err(anyhow::Error::from);
    let loss = || model.forward(&images).cross_entropy(&labels);
    println!("MLP 784-128-10, batch 64, forward as it is explained:\n{}", loss().explain()?);
    let graph = median(quiet, |()| {
        std::hint::black_box(loss());
        Ok(())
    })?;
    let backward = median(|| quiet().map(|()| loss()), |loss| Ok(loss.backward()?))?;
    let step = median(
        || {
            loss().backward()?;
            quiet()
        },
        |()| Ok(optimizer.step()?),
    )?;
    let whole = median(quiet, |()| {
        loss().backward()?;
        optimizer.step()?;
        quiet()
    })?;
    println!("  the graph                      {graph:8.2} µs");
    println!("  graphs recorded                {:8}", graphs_made() - before);
    println!("  backward, planned and sent     {backward:8.2} µs");
    println!("  step, planned and sent         {step:8.2} µs");
    println!("  all of it, waited for          {whole:8.2} µs");
    Ok(())
}

fn of_decoding(cuda: &CudaDevice) -> anyhow::Result<()> {
    let mut decoder = Decoder::new()?;
    let quiet = || cuda.synchronize().map_err(anyhow::Error::from);
    let before = graphs_made();
    let send = median(quiet, |()| Ok(decoder.step()?))?;
    let mut decoder = Decoder::new()?;
    let whole = median(quiet, |()| {
        decoder.step()?;
        quiet()
    })?;
    println!("a token of a transformer, 4 layers of 512:");
    println!("  graphs recorded                {:8}", graphs_made() - before);
    println!("  planned and sent               {send:8.2} µs");
    println!("  all of it, waited for          {whole:8.2} µs");
    Ok(())
}

pub(crate) fn print() -> anyhow::Result<()> {
    let device = match Device::named("cuda") {
        Ok(device) => device,
        Err(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    let Device::Cuda(cuda) = &device else { anyhow::bail!("{device:?} is no GPU") };
    set_device(device.clone());
    println!("a round trip with nothing to do {:8.2} µs", median(|| Ok(()), |()| Ok(cuda.synchronize()?))?);
    for rows in [16, 4096, 65_536] {
        of_rows(rows, cuda, &device)?;
    }
    of_training(cuda, &device)?;
    of_decoding(cuda)
}
