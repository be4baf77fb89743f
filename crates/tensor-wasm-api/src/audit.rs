//! The audit log: one JSON line for every state change, every invocation and every token or page that was refused, to
//! stdout, a file or nowhere (`TENSOR_WASM_API_AUDIT_LOG`).
//!
//! Lines are collected in memory and written by a thread of their own every few milliseconds, so that no request waits
//! for the disk. If the disk cannot keep up, lines are dropped rather than requests, and a line says how many. Rotation
//! is `logrotate`'s: a file that is renamed or removed is opened anew under its name.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::Thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde::Serialize;

/// How long a line may lie in memory.
const FLUSH_EVERY: Duration = Duration::from_millis(20);

/// Lines waiting to be written, in bytes.
const WAITING_BYTES_MAX: usize = 16 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Target {
    #[default]
    Stdout,
    None,
    File(PathBuf),
}

impl Target {
    pub fn parse(text: &str) -> Result<Target, String> {
        match text {
            "stdout" => Ok(Target::Stdout),
            "none" => Ok(Target::None),
            other => match other.strip_prefix("file:").filter(|path| !path.is_empty()) {
                Some(path) => Ok(Target::File(path.into())),
                None => Err(format!("TENSOR_WASM_API_AUDIT_LOG: {other:?} is not stdout, none or file:PATH")),
            },
        }
    }
}

/// One line.
#[derive(Debug, Serialize)]
pub(crate) struct Line<'a> {
    pub event: &'static str,
    pub tenant: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub subject: &'a str,
    /// Of the function, where one was served or made.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub revision: &'a str,
    /// The name of the token, never the token.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub token: &'a str,
    /// The address of whoever is at the other end of the connection: a proxy's, where there is one.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub client: &'a str,
    pub trace_id: &'a str,
    pub status: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<&'static str>,
    pub duration_us: u64,
}

#[derive(Clone)]
pub(crate) struct Audit {
    shared: Option<Arc<AuditQueue>>,
}

struct AuditQueue {
    waiting: Mutex<Waiting>,
    writer: std::sync::OnceLock<Thread>,
}

#[derive(Default)]
struct Waiting {
    bytes: Vec<u8>,
    dropped: u64,
    closed: bool,
}

impl Audit {
    pub(crate) fn open(target: &Target) -> std::io::Result<(Audit, Option<std::thread::JoinHandle<()>>)> {
        let mut sink: Box<dyn Write + Send> = match target {
            Target::None => return Ok((Audit { shared: None }, None)),
            Target::Stdout => Box::new(std::io::stdout()),
            Target::File(path) => Box::new(AuditFile::open(path)?),
        };
        let shared = Arc::new(AuditQueue { waiting: Mutex::default(), writer: std::sync::OnceLock::new() });
        let own = shared.clone();
        let thread = std::thread::Builder::new().name("audit".to_owned()).spawn(move || own.run(&mut *sink))?;
        let _ = shared.writer.set(thread.thread().clone());
        Ok((Audit { shared: Some(shared) }, Some(thread)))
    }

    pub(crate) fn is_off(&self) -> bool {
        self.shared.is_none()
    }

    pub(crate) fn line(&self, line: &Line<'_>) {
        #[derive(Serialize)]
        struct Stamped<'a> {
            time_ms: u64,
            #[serde(flatten)]
            line: &'a Line<'a>,
        }
        let Some(shared) = &self.shared else { return };
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let time_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        let mut waiting = shared.waiting.lock();
        if waiting.bytes.len() > WAITING_BYTES_MAX {
            waiting.dropped += 1;
            return;
        }
        let was_empty = waiting.bytes.is_empty();
        // Writing into memory cannot fail.
        let _ = serde_json::to_writer(&mut waiting.bytes, &Stamped { time_ms, line });
        waiting.bytes.push(b'\n');
        drop(waiting);
        if was_empty && let Some(writer) = shared.writer.get() {
            writer.unpark();
        }
    }

    /// Writes what is waiting and ends the thread.
    pub(crate) fn close(&self) {
        let Some(shared) = &self.shared else { return };
        shared.waiting.lock().closed = true;
        if let Some(writer) = shared.writer.get() {
            writer.unpark();
        }
    }
}

/// A file that whoever rotates logs may rename or remove under us: the next lines go to a new one of its name.
struct AuditFile {
    path: PathBuf,
    file: File,
}

impl AuditFile {
    fn open(path: &Path) -> std::io::Result<AuditFile> {
        // What it says about callers is the operator's to read.
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
        Ok(AuditFile { path: path.to_owned(), file })
    }

    fn is_moved(&self) -> bool {
        match (std::fs::metadata(&self.path), self.file.metadata()) {
            (Ok(named), Ok(open)) => (named.dev(), named.ino()) != (open.dev(), open.ino()),
            (Err(error), _) => error.kind() == std::io::ErrorKind::NotFound,
            (_, Err(_)) => false,
        }
    }
}

impl Write for AuditFile {
    /// Called with whole lines, a few times a second at most.
    fn write(&mut self, lines: &[u8]) -> std::io::Result<usize> {
        if self.is_moved() {
            *self = AuditFile::open(&self.path)?;
        }
        // All of it or an error: a line is never divided between two files.
        self.file.write_all(lines).map(|()| lines.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

impl AuditQueue {
    fn run(&self, sink: &mut dyn Write) {
        let mut batch = Vec::new();
        loop {
            let (dropped, closed) = {
                let mut waiting = self.waiting.lock();
                std::mem::swap(&mut batch, &mut waiting.bytes);
                (std::mem::take(&mut waiting.dropped), waiting.closed)
            };
            if dropped > 0 {
                let _ = writeln!(batch, "{{\"event\":\"audit.dropped\",\"lines\":{dropped}}}");
            }
            if !batch.is_empty() {
                if let Err(error) = sink.write_all(&batch).and_then(|()| sink.flush()) {
                    tracing::error!(%error, "the audit log cannot be written");
                }
                batch.clear();
                if !closed {
                    // Collects what comes meanwhile; a wake-up per line would cost more than the line.
                    let until = std::time::Instant::now() + FLUSH_EVERY;
                    while let Some(left) = until.checked_duration_since(std::time::Instant::now()) {
                        std::thread::park_timeout(left);
                        if self.waiting.lock().closed {
                            break;
                        }
                    }
                }
            } else if closed {
                return;
            } else {
                std::thread::park();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_json_and_complete_after_closing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit");
        let (audit, thread) = Audit::open(&Target::parse(&format!("file:{}", path.display())).unwrap()).unwrap();
        for n in 0..1000 {
            let trace = n.to_string();
            let line = Line {
                event: "function.invoke",
                tenant: "a\n\"b",
                subject: "f",
                revision: "",
                token: "ci",
                client: "::1",
                trace_id: &trace,
                status: 200,
                error: None,
                duration_us: n,
            };
            audit.line(&line);
        }
        audit.close();
        thread.unwrap().join().unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(lines.len(), 1000);
        assert_eq!(lines[999]["trace_id"], "999");
        assert_eq!(lines[0]["tenant"], "a\n\"b");
    }

    #[test]
    fn a_file_that_was_rotated_is_made_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit");
        let mut file = AuditFile::open(&path).unwrap();
        file.write_all(b"one\n").unwrap();
        std::fs::rename(&path, dir.path().join("audit.1")).unwrap();
        file.write_all(b"two\n").unwrap();
        std::fs::remove_file(&path).unwrap();
        file.write_all(b"three\n").unwrap();
        assert_eq!(std::fs::read_to_string(dir.path().join("audit.1")).unwrap(), "one\n");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "three\n");
    }

    #[test]
    fn targets() {
        assert_eq!(Target::parse("none"), Ok(Target::None));
        assert!(Target::parse("file:").is_err());
        assert!(Target::parse("syslog").unwrap_err().contains("syslog"));
    }
}
