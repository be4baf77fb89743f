//! Models as files: what is added is there until it is removed, whole or not at all; what lies or is damaged is refused
//! by name; a tenant has what its limits say, and nobody else's.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use tensor_wasm_tensor::{Tensor, io};

use crate::deploy::peak_kib;
use crate::support::{Answer, Options, Server, guest, read_all, send, stderr, stdout, wait_until};

const OCTETS: [(&str, &str); 1] = [("content-type", "application/octet-stream")];

const ONE: &str = r#"(module (func (export "which") (result i32) i32.const 1))"#;

/// A safetensors file of one tensor.
fn model(elements: &[f32]) -> Vec<u8> {
    let mut file = Vec::new();
    let tensor = Tensor::from_slice(elements, &[elements.len()]);
    io::write_safetensors(&mut file, [("w", tensor)], &Default::default()).unwrap();
    file
}

/// A file with a header that says anything.
fn file(header: &str, elements: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + elements, 0);
    file
}

fn add(server: &Server, name: &str, file: &[u8]) -> Answer {
    server.request("PUT", &format!("/models/{name}"), &OCTETS, file)
}

fn names(server: &Server) -> Vec<String> {
    let models = server.get("/models").ok();
    models.as_array().unwrap().iter().map(|model| model["name"].as_str().unwrap().to_owned()).collect()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

fn stored(server: &Server) -> Vec<PathBuf> {
    files(&server.data.path().join("models"))
}

#[test]
fn a_model_is_added_listed_replaced_and_removed() {
    let server = Server::start();
    let (one, two) = (model(&[1.0, 2.0]), model(&[3.0]));
    let added = add(&server, "m", &one);
    assert_eq!(added.status, 201, "{}", added.text());
    let added = added.json();
    assert_eq!(added["hash"], blake3::hash(&one).to_hex().as_str());
    assert_eq!((&added["bytes"], &added["tensors"]), (&json!(one.len()), &json!(1)));
    assert_eq!(server.get("/models").ok(), json!([added]));
    let mut detail = server.get("/models/m").ok();
    assert_eq!(detail.as_object_mut().unwrap().remove("functions"), Some(json!([])));
    assert_eq!(detail, added);
    let [path] = &stored(&server)[..] else { panic!("{:?}", stored(&server)) };
    assert_eq!(std::fs::read(path).unwrap(), one);
    // The same file under another name is there once.
    add(&server, "same", &one).ok();
    assert_eq!(stored(&server).len(), 1);
    let replaced = add(&server, "m", &two);
    assert_eq!(replaced.status, 200);
    assert_eq!(replaced.json()["hash"], blake3::hash(&two).to_hex().as_str());
    assert_eq!((names(&server), stored(&server).len()), (vec!["m".to_owned(), "same".to_owned()], 2));
    assert_eq!(server.request("DELETE", "/models/m", &[], b"").status, 204);
    assert_eq!(server.request("DELETE", "/models/same", &[], b"").status, 204);
    assert_eq!((names(&server), stored(&server)), (vec![], vec![]));
    assert_eq!(files(&server.data.path().join("model-manifests")), Vec::<PathBuf>::new());
    let gone = server.request("DELETE", "/models/m", &[], b"").refused(404, "not_found");
    assert!(gone.contains("no model \"m\""), "{gone}");
    server.get("/models/m").refused(404, "not_found");
}

#[test]
fn changes_of_models_are_in_the_audit_log() {
    let server = Server::start();
    add(&server, "m", &model(&[1.0])).ok();
    add(&server, "bad", b"nonsense").refused(400, "invalid_model");
    server.request("DELETE", "/models/m", &[], b"");
    let lines = || -> Vec<(String, String, u64, Option<String>)> {
        let lines = server.audit.lock().unwrap();
        let parsed = lines.iter().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let of = |line: Value| {
            let (event, subject) = (text(&line["event"])?, text(&line["subject"])?);
            Some((event, subject, line["status"].as_u64()?, text(&line["error"])))
        };
        parsed.filter_map(of).filter(|(event, ..)| event.starts_with("model.")).collect()
    };
    wait_until("three lines", || lines().len() == 3);
    let expected = [
        ("model.add", "m", 201, None),
        ("model.add", "bad", 400, Some("invalid_model")),
        ("model.remove", "m", 204, None),
    ];
    let expected = expected.map(|(event, subject, status, error)| {
        (event.to_owned(), subject.to_owned(), status, error.map(str::to_owned))
    });
    assert_eq!(lines(), expected);
}

#[test]
fn files_that_lie_are_refused_with_what_is_wrong_and_leave_nothing() {
    let server = Server::start();
    let entry = |dtype: &str, shape: &str, span: &str| {
        format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{span}}}}}"#)
    };
    let pair = |a: &str, b: &str| {
        let one = |span: &str| format!(r#"{{"dtype":"U8","shape":[4],"data_offsets":{span}}}"#);
        format!(r#"{{"a":{},"b":{}}}"#, one(a), one(b))
    };
    let mut bool_seven = file(&entry("BOOL", "[2]", "[0,2]"), 2);
    *bool_seven.last_mut().unwrap() = 7;
    let long = format!("{{{}}}", " ".repeat(5 << 20));
    for (bytes, expected) in [
        (Vec::new(), "it has 0 bytes"),
        (b"GGUF".to_vec(), "it has 4 bytes"),
        (u64::MAX.to_le_bytes().to_vec(), "its header has 18446744073709551615 bytes, and 0 are there"),
        (file("[]", 0), "an object with a tensor for each name"),
        (file(&entry("F8_E4M3", "[4]", "[0,4]"), 4), "its elements are \"F8_E4M3\""),
        (file(&entry("F32", "[4]", "[0,4]"), 4), "shape [4] of f32 has 16 bytes, and it says 4"),
        (file(&entry("F32", "[4]", "[0,16]"), 15), "it says bytes 0 to 16 of 15"),
        (file(&entry("F32", "[1099511627776]", "[0,4398046511104]"), 4), "it says bytes 0 to 4398046511104 of 4"),
        (file(&entry("F32", "[4294967296,4294967296]", "[0,0]"), 0), "more than any memory holds"),
        (file(&entry("F32", "[1]", "[0,4]"), 8), "4 bytes at its end belong to no tensor"),
        (file(&pair("[0,4]", "[2,6]"), 6), "overlaps with another tensor, at byte 2"),
        (file(&pair("[0,4]", "[6,10]"), 10), "leaves a gap before it"),
        (bool_seven, "element 1 is the byte 7, and a bool is 0 or 1"),
        (file(&long, 0), "at most 4194304 are read"),
        (model(&[1.0, 2.0])[..60].to_vec(), "cut off"),
    ] {
        let message = add(&server, "m", &bytes).refused(400, "invalid_model");
        assert!(message.contains(expected), "{message:?} does not contain {expected:?}");
    }
    add(&server, "-m", &model(&[1.0])).refused(400, "invalid_name");
    let typed = [("content-type", "application/json")];
    server.request("PUT", "/models/m", &typed, &model(&[1.0])).refused(415, "unsupported_media_type");
    assert_eq!((names(&server), stored(&server)), (vec![], vec![]));
    assert_eq!(files(&server.data.path().join("tmp")), Vec::<PathBuf>::new());
}

#[test]
fn a_large_model_is_streamed_to_disk() {
    const BYTES: usize = 200 << 20;
    let server = Server::start();
    add(&server, "small", &model(&[1.0])).ok();
    let before = peak_kib(&server);
    let file = file(&format!(r#"{{"w":{{"dtype":"U8","shape":[{BYTES}],"data_offsets":[0,{BYTES}]}}}}"#), BYTES);
    assert_eq!(add(&server, "large", &file).ok()["bytes"], file.len());
    let grown = peak_kib(&server).saturating_sub(before);
    assert!(grown < 48 << 10, "a model of {} MiB took {} MiB of memory", BYTES >> 20, grown >> 10);
}

#[test]
fn a_model_that_breaks_off_leaves_nothing() {
    let server = Server::start();
    let mut stream = server.connect();
    send(&mut stream, "PUT /models/m HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n");
    send(&mut stream, "content-length: 30000000\r\n\r\n");
    stream.write_all(&vec![7; 1_000_000]).unwrap();
    let tmp = server.data.path().join("tmp");
    wait_until("its scratch file", || !files(&tmp).is_empty());
    drop(stream);
    wait_until("the scratch file to go", || files(&tmp).is_empty());
    assert_eq!((names(&server), stored(&server)), (vec![], vec![]));
}

#[test]
fn a_tenant_has_as_many_and_as_large_models_as_its_limits_say() {
    let one = model(&[1.0; 100]);
    let (bytes, room) = (one.len(), one.len() * 2 + 10);
    let config = format!("[limits]\nmodel_bytes_max = {bytes}\nmodels_max = 3\nmodels_bytes_max = {room}\n");
    let server = Server::with(Options::config(&config));
    let message = add(&server, "m", &model(&[1.0; 101])).refused(413, "body_too_large");
    assert!(message.contains("[limits] model_bytes_max"), "{message}");
    // One of no announced length is cut off where it becomes too long.
    let mut stream = server.connect();
    send(&mut stream, "PUT /models/m HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n");
    send(&mut stream, "content-type: application/octet-stream\r\ntransfer-encoding: chunked\r\n\r\n");
    send(&mut stream, &format!("{:x}\r\n{}\r\n0\r\n\r\n", bytes + 1, "x".repeat(bytes + 1)));
    let answer = String::from_utf8(read_all(&mut stream)).unwrap();
    assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("model_bytes_max"), "{answer}");
    add(&server, "a", &one).ok();
    add(&server, "b", &one).ok();
    // What it would take is asked before it is sent.
    let message = add(&server, "c", &one).refused(409, "conflict");
    assert!(message.contains("[limits] models_bytes_max") && message.contains(&room.to_string()), "{message}");
    // Replacing one needs no more room.
    add(&server, "b", &model(&[2.0; 100])).ok();
    server.request("DELETE", "/models/b", &[], b"");
    for name in ["b", "c"] {
        add(&server, name, &model(&[2.0])).ok();
    }
    let message = add(&server, "d", &model(&[2.0])).refused(409, "conflict");
    assert!(message.contains("3 models") && message.contains("[limits] models_max"), "{message}");
    assert_eq!(names(&server), ["a", "b", "c"]);
}

#[test]
fn models_belong_to_their_tenant() {
    let tokens = "operator-token:tenant=*;acme-token:tenant=acme;other-token:tenant=other";
    let server = Server::with(Options::default().env("TENSOR_WASM_API_TOKENS", tokens));
    let with = |token: &str| [("authorization", format!("Bearer {token}-token")), ("content-type", OCTETS[0].1.into())];
    let ask = |token: &str, method: &str, path: &str, body: &[u8]| {
        let headers = with(token);
        server.request(method, path, &headers.each_ref().map(|(name, value)| (*name, value.as_str())), body)
    };
    server.request("PUT", "/models/m", &OCTETS, &model(&[1.0])).refused(401, "unauthorized");
    ask("acme", "PUT", "/models/m", &model(&[1.0])).ok();
    ask("other", "GET", "/models/m", b"").refused(404, "not_found");
    assert_eq!(ask("other", "GET", "/models", b"").ok(), json!([]));
    ask("other", "DELETE", "/models/m", b"").refused(404, "not_found");
    // The same name and the same bytes are another model.
    ask("other", "PUT", "/models/m", &model(&[1.0])).ok();
    assert_eq!(ask("other", "DELETE", "/models/m", b"").status, 204);
    assert_eq!(ask("acme", "GET", "/models/m", b"").ok()["tenant"], "acme");
    assert_eq!(stored(&server).len(), 1);
    // A function cannot name another tenant's.
    let headers = [("authorization", "Bearer other-token"), ("content-type", "application/wasm")];
    let path = "/functions?name=f&settings=%7B%22models%22%3A%5B%22m%22%5D%7D";
    let message = server.request("POST", path, &headers, &wat::parse_str(ONE).unwrap()).refused(400, "invalid_args");
    assert!(message.contains("tenant \"other\" has no model \"m\""), "{message}");
}

#[test]
fn functions_name_their_models_and_keep_them_from_being_removed() {
    let server = Server::start();
    let wasm = wat::parse_str(ONE).unwrap();
    let missing = server.deploy_with("f", &wasm, r#"{"models":["m"]}"#).refused(400, "invalid_args");
    assert!(missing.contains("tensor-wasm model add m FILE.safetensors"), "{missing}");
    server.get("/functions/f").refused(404, "not_found");
    let plain = server.deploy_with("f", &wasm, "{}").ok()["revision"].clone();
    add(&server, "m", &model(&[1.0])).ok();
    add(&server, "n", &model(&[2.0])).ok();
    let naming = server.deploy_with("f", &wasm, r#"{"models":["n","m","n"]}"#).ok()["revision"].clone();
    assert_ne!(naming, plain, "models are part of a revision");
    assert_eq!(server.get("/functions/f").ok()["settings"]["models"], json!(["m", "n"]));
    // What is not mentioned stays; null is none; a list is all of them.
    server.deploy_with("f", &wasm, r#"{"public":true}"#).ok();
    assert_eq!(server.get("/functions/f/revisions").ok()[0]["settings"]["models"], json!(["m", "n"]));
    server.deploy_with("f", &wasm, r#"{"models":["m"],"public":null}"#).ok();
    assert_eq!(server.get("/models/m").ok()["functions"], json!(["f"]));
    assert_eq!(server.get("/models/n").ok()["functions"], json!([]));
    let message = server.request("DELETE", "/models/m", &[], b"").refused(409, "conflict");
    assert!(message.contains("used by f;") && message.contains("--force"), "{message}");
    assert_eq!(server.request("DELETE", "/models/n", &[], b"").status, 204);
    assert_eq!(server.deploy_with("f", &wasm, r#"{"models":null}"#).ok()["revision"], plain);
    server.post("/functions/f/rollback", "").ok();
    assert_eq!(server.request("DELETE", "/models/m?force=true", &[], b"").status, 204);
    // A function that names what is gone can be deployed: its settings were not mentioned.
    server.deploy_with("f", &wasm, r#"{"reuse":true}"#).ok();
    server.deploy_with("f", &wasm, r#"{"models":[]}"#).ok();
    for (settings, expected) in [
        (r#"{"models":"m"}"#, "invalid_json"),
        (r#"{"models":["../m"]}"#, "invalid_args"),
        (r#"{"models":[""]}"#, "invalid_args"),
    ] {
        server.deploy_with("f", &wasm, settings).refused(400, expected);
    }
    let many: Vec<String> = (0..33).map(|n| format!("m{n}")).collect();
    let message = server.deploy_with("f", &wasm, &json!({ "models": many }).to_string()).refused(400, "invalid_args");
    assert!(message.contains("more than 32"), "{message}");
}

#[test]
fn models_survive_kills_whole_or_not_at_all() {
    let mut random = StdRng::seed_from_u64(7);
    let server = Server::start();
    let mut data = server.data.clone();
    let mut server = Some(server);
    let mut acknowledged = std::collections::BTreeMap::new();
    for round in 0..6_u8 {
        let running = server.take().unwrap_or_else(|| Server::with(Options::default().data(&data)));
        for (name, hash) in &acknowledged {
            assert_eq!(running.get(&format!("/models/{name}")).ok()["hash"], *hash, "round {round}");
        }
        for path in stored(&running) {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            assert_eq!(blake3::hash(&std::fs::read(&path).unwrap()).to_hex().as_str(), name, "round {round}");
        }
        assert_eq!(files(&data.path().join("tmp")), Vec::<PathBuf>::new());
        let address = running.url("");
        let until = Duration::from_millis(random.random_range(20..200));
        let adding = std::thread::spawn(move || {
            let agent = ureq::Agent::config_builder().http_status_as_error(false).build().new_agent();
            let mut added = Vec::new();
            for n in 0..200_u16 {
                let (name, file) = (format!("m{}", n % 7), model(&[f32::from(n), f32::from(round), 1.0]));
                let request = agent.put(format!("{address}/models/{name}")).header(OCTETS[0].0, OCTETS[0].1);
                match request.send(&file[..]) {
                    Ok(answer) if answer.status().is_success() => {
                        added.push((name, json!(blake3::hash(&file).to_hex().as_str())));
                    }
                    _ => return (added, Some(name)),
                }
            }
            (added, None)
        });
        std::thread::sleep(until);
        data = running.kill();
        let (added, unknown) = adding.join().unwrap();
        acknowledged.extend(added);
        // Killed in the middle of it: the old one is there, or the new one, and which cannot be said.
        unknown.map(|name| acknowledged.remove(&name));
    }
    assert!(!acknowledged.is_empty());
}

#[test]
fn a_damaged_model_is_found_named_and_set_aside() {
    let server = Server::start();
    let (bad, good) = (model(&[1.0; 50]), model(&[2.0; 50]));
    add(&server, "bad", &bad).ok();
    add(&server, "good", &good).ok();
    add(&server, "gone", &model(&[3.0; 50])).ok();
    let data = server.kill();
    let path = |file: &[u8]| {
        let hash = blake3::hash(file).to_hex().to_string();
        data.path().join(format!("models/{}/{hash}.safetensors", &hash[..2]))
    };
    let mut bytes = std::fs::read(path(&bad)).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(path(&bad), bytes).unwrap();
    std::fs::remove_file(path(&model(&[3.0; 50]))).unwrap();
    let server = Server::with(Options::default().data(&data));
    assert!(server.get("/models/gone").ok()["quarantined"].as_str().unwrap().contains("missing"));
    wait_until("the scrub", || !server.get("/models/bad").ok()["quarantined"].is_null());
    assert_eq!(server.get("/models/good").ok()["quarantined"], Value::Null);
    assert!(!path(&bad).exists());
    let quarantined = files(&data.path().join("quarantine"));
    assert!(quarantined.iter().any(|path| path.to_string_lossy().contains(".safetensors")), "{quarantined:?}");
    let table = stdout(&server.cli(&["model", "list"]));
    assert!(table.lines().any(|line| line.starts_with("bad") && line.ends_with("damaged")), "{table}");
    // Adding it again brings it back.
    add(&server, "bad", &bad).ok();
    assert_eq!(server.get("/models/bad").ok()["quarantined"], Value::Null);
    assert_eq!(std::fs::read(path(&bad)).unwrap(), bad);
}

#[test]
fn models_are_rebuilt_with_a_lost_store() {
    let server = Server::start();
    let added = add(&server, "m", &model(&[1.0])).ok();
    add(&server, "replaced", &model(&[2.0])).ok();
    add(&server, "replaced", &model(&[3.0])).ok();
    let data = server.kill();
    std::fs::write(data.path().join("catalog.redb"), b"nonsense").unwrap();
    let server = Server::with(Options::default().data(&data));
    assert_eq!(server.get("/models").ok()[0], added);
    assert_eq!(names(&server), ["m", "replaced"]);
    assert_eq!(server.get("/models/replaced").ok()["hash"], blake3::hash(&model(&[3.0])).to_hex().as_str());
}

#[test]
fn the_command_line_adds_lists_shows_and_removes_models() {
    let server = Server::start();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    std::fs::write(&path, model(&[1.0, 2.0])).unwrap();
    let file = path.to_str().unwrap();
    let run = |args: &[&str]| {
        let output = server.cli(args);
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        stdout(&output)
    };
    let added = run(&["model", "add", "digits", file]);
    assert!(added.starts_with("added digits: 1 tensors, "), "{added}");
    let json: Value = serde_json::from_str(&run(&["model", "add", "digits", file, "--json"])).unwrap();
    assert_eq!(json["name"], "digits");
    let listed = run(&["model", "list"]);
    assert!(listed.lines().nth(1).unwrap().starts_with("digits"), "{listed}");
    let listed: Value = serde_json::from_str(&run(&["model", "list", "--json"])).unwrap();
    assert_eq!(listed[0]["hash"], json["hash"]);
    let wasm = guest("math.wasm");
    let deploy = |flags: &[&str]| run(&[&["deploy", wasm.to_str().unwrap(), "--name", "f"], flags].concat());
    deploy(&["--model", "digits"]);
    let shown = run(&["show", "f"]);
    assert!(shown.lines().any(|line| line.starts_with("setting") && line.ends_with("models digits")), "{shown}");
    assert!(
        run(&["model", "show", "digits"]).lines().any(|line| line.starts_with("functions") && line.ends_with(" f"))
    );
    let revisions = run(&["revisions", "f"]);
    assert!(revisions.contains(r#"models=["digits"]"#), "{revisions}");
    let refused = server.cli(&["model", "remove", "digits"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("used by f"), "{}", stderr(&refused));
    deploy(&["--no-models"]);
    assert!(!run(&["show", "f"]).contains("digits"));
    assert_eq!(run(&["model", "remove", "digits"]), "removed digits\n");
    for (args, code, expected) in [
        (&["model", "remove", "digits"][..], 1, "no model \"digits\""),
        (&["model", "add", "x", "/nowhere"], 2, "/nowhere"),
        (&["model", "add", "x", "/"], 2, "no file of a size"),
        (&["model", "add", "x", wasm.to_str().unwrap()], 1, "not a model we can use"),
        (&["model"], 2, "Usage"),
    ] {
        let output = server.cli(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(expected), "{args:?}: {}", stderr(&output));
    }
}
