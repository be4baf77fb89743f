//! A WASI command that does what its first argument says.

use std::io::{Read, Write};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| args.get(at).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
    match args.first().map(String::as_str) {
        None | Some("hello") => println!("hello, {}", args.get(1).map_or("world", |name| name)),
        Some("args") => println!("{}", args[1..].join("|")),
        Some("env") => std::env::vars().for_each(|(name, value)| println!("{name}={value}")),
        Some("upper") => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).expect("stdin is text");
            print!("{}", text.to_uppercase());
        }
        Some("cat") => print!("{}", std::fs::read_to_string(&args[1]).expect("the file is there")),
        Some("exit") => {
            eprintln!("leaving");
            std::process::exit(number(1) as i32);
        }
        Some("spam") => {
            let line = [b'x'; 64 * 1024];
            let mut out = std::io::stdout().lock();
            for _ in 0..number(1) {
                out.write_all(&line).expect("stdout is open");
            }
        }
        Some("spam-err") => {
            for _ in 0..number(1) {
                eprintln!("{}", "e".repeat(1023));
            }
        }
        Some("open") => {
            let opened = (0..number(1)).filter(|n| std::fs::File::create(format!("/f{n}")).is_ok()).count();
            println!("opened {opened}");
        }
        Some("sleep") => {
            std::thread::sleep(std::time::Duration::from_millis(number(1)));
            println!("slept");
        }
        Some("drip") => {
            for n in 0..number(1) {
                println!("drop {n}");
                std::thread::sleep(std::time::Duration::from_millis(number(2)));
            }
        }
        Some("loop") => loop {
            std::hint::black_box(0);
        },
        Some("panic") => panic!("asked to"),
        Some("primes") => {
            let limit = number(1) as usize;
            let mut composite = vec![false; limit + 1];
            let mut count = 0;
            for n in 2..=limit {
                if !composite[n] {
                    count += 1;
                    (n * 2..=limit).step_by(n).for_each(|m| composite[m] = true);
                }
            }
            println!("{count}");
        }
        Some(other) => {
            eprintln!("unknown: {other}");
            std::process::exit(2);
        }
    }
}
