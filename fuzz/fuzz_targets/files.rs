//! Any bytes as a file with tensors: the first one says of which format. Nothing may panic or take long, and what is
//! read can be written and read again as the same.

#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use tensor_wasm_tensor::{DType, Tensor, io};

fn read(format: u8, file: &[u8]) -> tensor_wasm_tensor::Result<Vec<Tensor>> {
    let one = |tensor: tensor_wasm_tensor::Result<Tensor>| tensor.map(|tensor| vec![tensor]);
    let dtype = DType::ALL[usize::from(format) / 6 % DType::ALL.len()];
    match format % 6 {
        0 => one(io::read_npy(file)),
        1 => io::read_npz(file).map(|all| all.into_values().collect()),
        2 => io::read_safetensors(file).map(|all| all.tensors.into_values().collect()),
        3 => one(io::read_idx(file)),
        4 => one(io::read_csv(file, dtype, io::CsvFormat::default())),
        _ => std::str::from_utf8(file).map_or(Ok(Vec::new()), |text| one(io::from_json(text, dtype))),
    }
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    let mut file = Vec::new();
    io::write_safetensors(&mut file, [("x", tensor.clone())], &BTreeMap::new()).expect("it is written");
    file
}

fuzz_target!(|input: &[u8]| {
    let Some((format, file)) = input.split_first() else { return };
    for tensor in read(*format, file).unwrap_or_default() {
        let written = bytes(&tensor);
        let again = io::read_safetensors(&written).expect("it is read").tensors.remove("x").expect("it is there");
        assert_eq!(bytes(&again), written);
        let mut npy = Vec::new();
        // There is one type that `.npy` does not have.
        if io::write_npy(&mut npy, &tensor).is_ok() {
            assert_eq!(bytes(&io::read_npy(&npy).expect("it is read")), written);
        }
        assert!(!tensor.to_string().is_empty());
    }
});
