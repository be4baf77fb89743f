//! A spinner on stderr while a command waits for a server. Nothing is shown where stderr is no terminal.

use std::io::IsTerminal;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Most calls take less than this; a spinner that comes and goes within a blink is noise.
const SHOW_AFTER: Duration = Duration::from_millis(500);

/// Shows how long something has been awaited, until it is dropped.
pub(crate) struct Waiting {
    end: Option<(Sender<()>, std::thread::JoinHandle<()>)>,
}

impl Waiting {
    pub(crate) fn new(what: String) -> Waiting {
        if !std::io::stderr().is_terminal() {
            return Waiting { end: None };
        }
        let (end, ended) = channel::<()>();
        let spin = move || {
            if ended.recv_timeout(SHOW_AFTER) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            let bar = ProgressBar::new_spinner().with_message(what);
            let style = ProgressStyle::with_template("{spinner} {msg}, {elapsed}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
            bar.enable_steady_tick(Duration::from_millis(100));
            let _ = ended.recv();
            bar.finish_and_clear();
        };
        let spawned = std::thread::Builder::new().name("progress".to_owned()).spawn(spin);
        Waiting { end: spawned.ok().map(|thread| (end, thread)) }
    }
}

impl Drop for Waiting {
    /// Waits until the line is cleared, so that it does not run into the result.
    fn drop(&mut self) {
        if let Some((end, thread)) = self.end.take() {
            drop(end);
            let _ = thread.join();
        }
    }
}
