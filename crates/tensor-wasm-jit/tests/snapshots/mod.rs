//! What some kernels become, each of which shows a pass of the compiler: `tests/snapshots/*.wat`, with the PTX beneath.
//! After a change that is meant, `TENSOR_WASM_BLESS=1` writes them anew, and what has changed is read in the
//! difference.

use tensor_wasm_jit::Program;

/// Between a kernel and its PTX.
const MARK: &str = ";; The PTX, without declarations, polls and traps:\n";

#[test]
fn kernels_become_what_their_snapshots_say() {
    let is_blessed = std::env::var("TENSOR_WASM_BLESS").is_ok_and(|value| value == "1");
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/snapshots");
    let mut wrong = Vec::new();
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|ending| ending != "wat") {
            continue;
        }
        count += 1;
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with(";; "), "{} says what it shows", path.display());
        let source = text.split(MARK).next().unwrap_or_default().trim_end();
        let wasm = wat::parse_str(source).unwrap();
        let program = Program::read(&wasm).unwrap();
        let windows = program.pointers("k").unwrap();
        let ptx = program.compile("k", &windows).unwrap().ptx;
        let expected = format!("{source}\n\n{MARK}{}", shown(&ptx));
        if expected != text {
            if is_blessed { std::fs::write(&path, expected).unwrap() } else { wrong.push(path) }
        }
    }
    assert!(count > 5, "there are snapshots");
    assert!(wrong.is_empty(), "{wrong:?} are not what is compiled; TENSOR_WASM_BLESS=1 writes them anew");
}

/// What is particular about a kernel, as comments: from where it begins to what is seldom run.
fn shown(ptx: &str) -> String {
    let code = ptx.split("%kind, %site, %which;\n").nth(1).unwrap_or(ptx);
    let code = code.split("BEGIN:\n").last().unwrap_or(code);
    let is_aside = |line: &str| line.ends_with(':') && line.starts_with(['P', 'U', 'B', 'T', 'W']) || line == "LATE:";
    let lines = code.lines().take_while(|line| !is_aside(line));
    lines.map(|line| format!(";; {}\n", line.replace('\t', "    "))).collect()
}
