//! Writing to stdout. A reader that leaves early (`| head`) ends the command quietly, where `println!` would panic; and
//! what strangers wrote is shown without the control characters by which it could move in the terminal.

use std::fmt::Arguments;
use std::io::{ErrorKind, StdoutLock, Write};

/// As `println!`, but for pipes that close.
macro_rules! outln {
    ($($arg:tt)*) => { $crate::output::write(format_args!("{}\n", format_args!($($arg)*))) };
}

pub(crate) use outln;

pub(crate) fn write(text: Arguments<'_>) {
    to_stdout(|stdout| stdout.write_fmt(text));
}

pub(crate) fn write_bytes(bytes: &[u8]) {
    to_stdout(|stdout| stdout.write_all(bytes));
}

fn to_stdout(write: impl FnOnce(&mut StdoutLock<'_>) -> std::io::Result<()>) {
    let mut stdout = std::io::stdout().lock();
    // What does not end in a line feed would be written after `main`, where an error is lost.
    match write(&mut stdout).and_then(|()| stdout.flush()) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => {
            eprintln!("error: stdout: {error}");
            std::process::exit(1);
        }
    }
}

/// Text in which control characters other than line feeds and tabs are escaped.
pub(crate) fn printable(text: &str) -> String {
    let escaped = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(escaped) {
        return text.to_owned();
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if escaped(c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_reach_a_terminal() {
        assert_eq!(printable("wörld\tof\nlines"), "wörld\tof\nlines");
        assert_eq!(printable("\u{1b}[2Jgone\r\u{7}\u{9b}1m"), "\\u{1b}[2Jgone\\r\\u{7}\\u{9b}1m");
    }
}
