//! How far an upload is, for whoever waits for it.

use std::io::{IsTerminal, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Without a terminal, the first line about progress comes after this long, and then one every so often.
const LINE_AFTER: Duration = Duration::from_secs(2);
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Bytes sent, then how long the server has been at work on them. On a terminal a bar and a spinner; elsewhere lines on
/// stderr, and those only where it takes long enough to wonder.
pub(crate) struct Progress {
    bar: ProgressBar,
    bytes: u64,
    /// What the server does once it has all of them.
    then: &'static str,
    lines: Option<Lines>,
}

/// Lines for where there is no terminal, written by a thread of their own.
struct Lines {
    /// Becomes true when all bytes are sent.
    sent: Arc<AtomicBool>,
    /// Dropped at the end, which ends the thread.
    end: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Progress {
    pub(crate) fn new(bytes: u64, then: &'static str) -> Progress {
        if !std::io::stderr().is_terminal() {
            return Progress { bar: ProgressBar::hidden(), bytes, then, lines: Some(Lines::start(bytes, then)) };
        }
        let bar = ProgressBar::new(bytes);
        let style = ProgressStyle::with_template("uploading {bar:30} {bytes}/{total_bytes}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Progress { bar, bytes, then, lines: None }
    }

    fn sent(&self, bytes: usize) {
        self.bar.inc(bytes as u64);
        if self.bar.position() < self.bytes {
            return;
        }
        match &self.lines {
            Some(lines) => lines.sent.store(true, Ordering::Relaxed),
            None => {
                // The clock of the spinner is the server's, not the upload's.
                self.bar.reset_elapsed();
                let style = ProgressStyle::with_template(&format!("{{spinner}} {}, {{elapsed}}", self.then));
                self.bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
                self.bar.enable_steady_tick(Duration::from_millis(100));
            }
        }
    }

    pub(crate) fn end(mut self) {
        self.bar.finish_and_clear();
        if let Some(mut lines) = self.lines.take() {
            drop(lines.end.take());
            let _ = lines.thread.take().map(JoinHandle::join);
        }
    }
}

impl Lines {
    fn start(bytes: u64, then: &'static str) -> Lines {
        let sent = Arc::<AtomicBool>::default();
        let (end, ended) = mpsc::channel();
        let seen = sent.clone();
        let write = move || {
            let begun = Instant::now();
            let mut wait = LINE_AFTER;
            while ended.recv_timeout(wait) == Err(mpsc::RecvTimeoutError::Timeout) {
                let doing = if seen.load(Ordering::Relaxed) { then } else { "uploading" };
                eprintln!("{doing} {:.1} MB, {} s", bytes as f64 / 1e6, begun.elapsed().as_secs());
                wait = LINE_EVERY;
            }
        };
        let thread = std::thread::Builder::new().name("progress".to_owned()).spawn(write).ok();
        Lines { sent, end: Some(end), thread }
    }
}

/// What is sent, as it is read.
pub(crate) struct Uploading<'a, R> {
    pub(crate) from: R,
    pub(crate) progress: &'a Progress,
}

impl<R: Read> Read for Uploading<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.from.read(buffer)?;
        self.progress.sent(read);
        Ok(read)
    }
}
