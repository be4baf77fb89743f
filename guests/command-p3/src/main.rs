//! A command of WASI 0.3 as Rust's toolchain makes it: `main` becomes the 0.2 `run` that is exported beside the 0.3
//! one. Whoever runs this `main` runs the wrong export.

use std::time::Duration;

struct Command;

fn main() {
    println!("run by the export of WASI 0.2");
    std::process::exit(1);
}

impl wasip3::exports::cli::run::Guest for Command {
    async fn run() -> Result<(), ()> {
        let args = wasip3::cli::environment::get_arguments();
        let number = args.get(2).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
        match args.get(1).map(String::as_str) {
            None | Some("hello") => print("hello from WASI 0.3\n").await,
            Some("sleep") => {
                let nanos = u64::try_from(Duration::from_millis(number).as_nanos()).unwrap_or(u64::MAX);
                wasip3::clocks::monotonic_clock::wait_for(nanos).await;
                print("slept\n").await;
            }
            Some("env") => {
                let all = wasip3::cli::environment::get_environment();
                print(&all.iter().map(|(name, value)| format!("{name}={value}\n")).collect::<String>()).await;
            }
            Some("exit") => wasip3::cli::exit::exit_with_code(u8::try_from(number).unwrap_or(1)),
            Some(_) => return Err(()),
        }
        Ok(())
    }
}

async fn print(text: &str) {
    let (mut writer, reader) = wasip3::wit_stream::new();
    let written = wasip3::cli::stdout::write_via_stream(reader);
    writer.write_all(text.as_bytes().to_vec()).await;
    drop(writer);
    written.await.expect("stdout is open");
}

wasip3::cli::command::export!(Command);
