//! Functions with models of the host's: one reads digits, one writes a text letter by letter. The tensor library in
//! this process, with the same weights, is what they are compared with. Everything runs on the CPU, and again on a GPU
//! where there is one.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::json;
use tensor_wasm_tensor::nn::Module;
use tensor_wasm_tensor::{DType, Tensor, io, no_grad};

use crate::examples::digits::Digits;
use crate::examples::models::{self, Transformer};
use crate::examples::text::{STORY, Text};
use crate::support::{Answer, Options, Server, devices, guest_bytes, root, send, wait_until};

/// Pictures that no training saw: examples train with those of seed 1.
const HELD_OUT: (usize, u64) = (60, 4711);

const PROMPT: &str = "The ";

fn weights(guest: &str, file: &str) -> PathBuf {
    root().join("guests").join(guest).join(file)
}

fn server(device: &str) -> Server {
    // Long enough for a slow machine that compiles the first plans of its life.
    Server::with(Options::config("[limits]\ndeadline_ms_max = 120000\n").device(device))
}

fn add(server: &Server, name: &str, file: &PathBuf) {
    let octets = [("content-type", "application/octet-stream")];
    server.request("PUT", &format!("/models/{name}"), &octets, &std::fs::read(file).unwrap()).ok();
}

fn deploy(server: &Server, name: &str, file: &str, model: &str) {
    let settings = json!({ "models": [model], "env": { "MODEL": model }, "gpu": true });
    server.deploy_with(name, &guest_bytes(file), &settings.to_string()).ok();
}

fn post(server: &Server, path: &str, body: &[u8]) -> Answer {
    server.request("POST", path, &[("content-type", "application/octet-stream")], body)
}

fn gray(pixels: &[f32]) -> Vec<u8> {
    pixels.iter().map(|pixel| (pixel * 255.0).round() as u8).collect()
}

/// A PNG of gray pixels as ink on paper, twice as large each way. What it holds is not compressed.
fn png(pixels: &[u8]) -> Vec<u8> {
    const SIDE: usize = 28;
    let row = |row: usize| (0..2 * SIDE).map(move |column| 255 - pixels[row / 2 * SIDE + column / 2]);
    // Every row begins with its filter, which is none.
    let rows: Vec<u8> = (0..2 * SIDE).flat_map(|n| std::iter::once(0).chain(row(n))).collect();
    let (mut a, mut b) = (1_u32, 0_u32);
    for byte in &rows {
        a = (a + u32::from(*byte)) % 65_521;
        b = (b + a) % 65_521;
    }
    let length = u16::try_from(rows.len()).unwrap();
    let mut data = vec![0x78, 0x01, 1];
    data.extend(length.to_le_bytes());
    data.extend((!length).to_le_bytes());
    data.extend(&rows);
    data.extend((b << 16 | a).to_be_bytes());
    let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
    let side = u32::try_from(2 * SIDE).unwrap().to_be_bytes();
    for (name, content) in
        [(b"IHDR", [&side[..], &side, &[8, 0, 0, 0, 0]].concat()), (b"IDAT", data), (b"IEND", Vec::new())]
    {
        let chunk = [&name[..], &content].concat();
        let mut crc = u32::MAX;
        for byte in &chunk {
            crc ^= u32::from(*byte);
            (0..8).for_each(|_| crc = (crc >> 1) ^ ((crc & 1) * 0xedb8_8320));
        }
        file.extend(u32::try_from(content.len()).unwrap().to_be_bytes());
        file.extend(&chunk);
        file.extend((!crc).to_be_bytes());
    }
    file
}

#[test]
fn a_function_reads_digits_that_no_training_saw() {
    devices().into_iter().for_each(reads_digits);
}

fn reads_digits(device: &str) {
    let server = server(device);
    let file = weights("classify", "digits.safetensors");
    add(&server, "digits", &file);
    deploy(&server, "classify", "classify.wasm", "digits");
    let model = models::cnn(1);
    let state = io::load_safetensors(&file).unwrap().into_state();
    let state: Vec<_> = state.into_iter().map(|(name, tensor)| (name, tensor.cast(DType::F32))).collect();
    model.load_state_dict(&state).unwrap();
    let digits = Digits::drawn(HELD_OUT.0, HELD_OUT.1);
    let (mut right, mut right_as_png) = (0, 0);
    for n in 0..digits.count() {
        let (pixels, label) = digits.picture(n).unwrap();
        let pixels = gray(&pixels);
        let answer = post(&server, "/run/classify/", &pixels).ok();
        right += usize::from(answer["digit"] == label);
        // As likely as the library thinks, with the pixels that were sent.
        let sent: Vec<f32> = pixels.iter().map(|pixel| f32::from(*pixel) / 255.0).collect();
        let input = Tensor::from_vec(sent, &[1, pixels.len()]);
        let expected = no_grad(|| model.forward(&input)).softmax(-1).to_vec::<f32>().unwrap();
        let found: Vec<f32> = serde_json::from_value(answer["probabilities"].clone()).unwrap();
        assert!(expected.iter().zip(&found).all(|(a, b)| (a - b).abs() < 1e-4), "{expected:?} and not {found:?}");
        right_as_png += usize::from(post(&server, "/run/classify/", &png(&pixels)).ok()["digit"] == label);
    }
    println!("{device}: of {} digits {right} are read right as bytes, {right_as_png} as PNG", digits.count());
    assert!(right * 10 >= digits.count() * 9 && right_as_png * 10 >= digits.count() * 9);
    // The model was read once, for all of them.
    assert_eq!(server.metric("tensor_wasm_model_loads_total"), 1.0);
    for (body, expected) in [(&b"no image"[..], "not a PNG"), (b"", "not a PNG")] {
        let refused = post(&server, "/run/classify/", body);
        assert!(refused.status == 400 && refused.text().contains(expected), "{}", refused.text());
    }
    assert_eq!(server.get("/run/classify/").status, 405);
}

#[test]
fn a_function_without_its_model_says_so() {
    let server = server("cpu");
    let file = weights("classify", "digits.safetensors");
    let settings = r#"{"env":{"MODEL":"digits"}}"#;
    let wasm = guest_bytes("classify.wasm");
    let ask = || post(&server, "/run/classify/", &[0; 784]);
    // Not named, though it is there.
    add(&server, "digits", &file);
    server.deploy_with("classify", &wasm, settings).ok();
    let denied = ask();
    assert!(denied.status == 503 && denied.text().contains("--model digits"), "{}", denied.text());
    server.deploy_with("classify", &wasm, r#"{"models":["digits"]}"#).ok();
    assert_eq!(ask().status, 200);
    // Removed under it.
    assert_eq!(server.request("DELETE", "/models/digits?force=true", &[], b"").status, 204);
    let gone = ask();
    assert!(gone.status == 503 && gone.text().contains("tensor-wasm model add digits"), "{}", gone.text());
    // Damaged under it.
    add(&server, "digits", &file);
    let hash = blake3::hash(&std::fs::read(&file).unwrap()).to_hex().to_string();
    let path = server.data.path().join(format!("models/{}/{hash}.safetensors", &hash[..2]));
    std::fs::write(&path, b"something else").unwrap();
    let damaged = ask();
    assert!(damaged.status == 503 && damaged.text().contains("damaged"), "{}", damaged.text());
    wait_until("the quarantine", || !server.get("/models/digits").ok()["quarantined"].is_null());
    add(&server, "digits", &file);
    assert_eq!(ask().status, 200);
    // More than the server may have in memory.
    let small = Server::with(Options::config("[limits]\nmodels_loaded_bytes_max = 1000\n"));
    add(&small, "digits", &file);
    deploy(&small, "classify", "classify.wasm", "digits");
    let large = post(&small, "/run/classify/", &[0; 784]);
    assert!(large.status == 503 && large.text().contains("models_loaded_bytes_max"), "{}", large.text());
}

/// What the library writes: as the function does it, but always from the whole window.
fn written(prompt: &str, count: usize) -> String {
    let text = Text::story(Transformer::CONTEXT).unwrap();
    let model = Transformer::new(text.letters(), 1);
    let state = io::load_safetensors(weights("generate", "story.safetensors")).unwrap().into_state();
    let is_weight = |(name, _): &(String, Tensor)| name != "alphabet" && name != "heads";
    let cast = |(name, tensor): (String, Tensor)| (name, tensor.cast(DType::F32));
    model.load_state_dict(&state.into_iter().filter(is_weight).map(cast).collect::<Vec<_>>()).unwrap();
    let mut window = text.numbers(prompt).unwrap();
    let mut written = Vec::new();
    for _ in 0..count {
        if window.len() > Transformer::CONTEXT {
            window.drain(..window.len() - Transformer::CONTEXT / 2);
        }
        let logits = no_grad(|| model.forward(&Tensor::from_slice(&window, &[1, window.len()])));
        let last = logits.narrow(1, window.len() - 1, 1).to_vec::<f32>().unwrap();
        let best = (0..last.len()).rev().max_by(|a, b| last[*a].total_cmp(&last[*b])).unwrap();
        window.push(best as i64);
        written.push(best as i64);
    }
    text.shown(&written)
}

#[test]
fn a_function_writes_what_the_library_writes_letter_by_letter() {
    devices().into_iter().for_each(writes_a_text);
}

fn writes_a_text(device: &str) {
    let server = server(device);
    add(&server, "story", &weights("generate", "story.safetensors"));
    deploy(&server, "generate", "generate.wasm", "story");
    let ask = |query: &str| {
        let answer = post(&server, &format!("/run/generate/?{query}"), PROMPT.as_bytes());
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.text()
    };
    // Longer than what the model looks at, so that its window moves twice.
    let count = 2 * Transformer::CONTEXT + 10;
    let likeliest = ask(&format!("tokens={count}&temperature=0"));
    println!("{device}: {PROMPT}|{likeliest}");
    assert_eq!(likeliest.chars().count(), count);
    assert_eq!(likeliest, written(PROMPT, count));
    assert_eq!(likeliest, ask(&format!("tokens={count}&temperature=0&seed=9")));
    // It is trained, and not only the same: most of its words are the story's. The first and the last are cut.
    let known: Vec<&str> = STORY.split_whitespace().collect();
    let words: Vec<&str> = likeliest.split_whitespace().skip(1).collect();
    let words = &words[..words.len() - 1];
    let count = words.iter().filter(|word| known.contains(word)).count();
    assert!(words.len() > 5 && count * 10 >= words.len() * 7, "{count} of {words:?}");
    let daring = |seed: u32| ask(&format!("tokens=60&temperature=1.5&seed={seed}"));
    assert_eq!(daring(1), daring(1));
    assert_ne!(daring(1), daring(2));
    for (body, query, expected) in [
        ("", "", "the prompt is empty"),
        ("snowman ☃", "", "'☃'"),
        ("The", "tokens=0", "from 1 to"),
        ("The", "heat=1", "no parameter heat"),
        ("The", "temperature=hot", "temperature is hot"),
    ] {
        let refused = post(&server, &format!("/run/generate/?{query}"), body.as_bytes());
        assert!(refused.status == 400 && refused.text().contains(expected), "{}: {}", refused.status, refused.text());
    }
}

#[test]
fn text_arrives_while_it_is_written_and_ends_with_its_reader() {
    devices().into_iter().for_each(streams_a_text);
}

fn streams_a_text(device: &str) {
    let server = server(device);
    add(&server, "story", &weights("generate", "story.safetensors"));
    deploy(&server, "generate", "generate.wasm", "story");
    let ask = |tokens: usize| {
        let mut stream = server.connect();
        send(&mut stream, &format!("POST /run/generate/?tokens={tokens} HTTP/1.1\r\nhost: localhost\r\n"));
        send(&mut stream, &format!("content-length: {}\r\n\r\n{PROMPT}", PROMPT.len()));
        stream.flush().unwrap();
        stream
    };
    let mut stream = ask(150);
    let (mut text, mut times) = (String::new(), Vec::new());
    let begun = Instant::now();
    while !text.ends_with("\r\n0\r\n\r\n") {
        let mut piece = [0; 4096];
        let read = stream.read(&mut piece).unwrap();
        assert!(read > 0, "it broke off: {text}");
        text += std::str::from_utf8(&piece[..read]).unwrap();
        times.push(begun.elapsed());
    }
    let head = text.split("\r\n\r\n").next().unwrap().to_lowercase();
    assert!(head.contains("transfer-encoding: chunked") && head.contains("text/plain"), "{head}");
    // A letter is a chunk; several may be read at once, and yet they come over time.
    assert_eq!(text.matches("\r\n1\r\n").count() + usize::from(text.contains("\r\n\r\n1\r\n")), 150 + 1, "{text}");
    let (first, last) = (times[0], times[times.len() - 1]);
    assert!(times.len() >= 10 && last - first > Duration::from_millis(10), "{} reads, {first:?} {last:?}", times.len());
    // Whoever leaves is not written for any longer: a text of ten thousand letters would take a while.
    let mut stream = ask(10_000);
    let mut piece = [0; 512];
    assert!(stream.read(&mut piece).unwrap() > 0);
    let active = "tensor_wasm_active_instances";
    assert_eq!(server.metric(active), 1.0);
    drop(stream);
    server.wait_for_metric(active, 0.0);
}
