//! The lifeline: a pipe that ties a worker process to the server that started it, however the server ends.
//!
//! The worker's standard input is the read end (`Stdio::piped()`); the server alone holds the write end, close-on-exec,
//! and writes nothing. The kernel closes it with the server, also on SIGKILL, and the worker's read then returns
//! end-of-file. A hang-up that came first is seen just as well, so there is no moment of a start that is not covered. A
//! death signal (`PR_SET_PDEATHSIG`) has one: a server that is gone before its worker asks for the signal never sends
//! it.

use std::io;

use rustix::io::Errno;
use rustix::process::Signal;

/// The thread reads one byte and kills; its stack counts towards the memory limit of a compile worker.
const STACK_BYTES: usize = 64 << 10;

/// Ends this process as soon as the server that started it is gone. A worker calls this before anything else, and ends
/// if it fails: from here on the process may map, compile and wait for a driver as long as it likes.
pub fn end_with_server() -> io::Result<()> {
    std::thread::Builder::new().name("lifeline".to_owned()).stack_size(STACK_BYTES).spawn(watch).map(drop)
}

fn watch() {
    let mut byte = [0];
    // Nobody writes; a byte means nothing. An error (a closed descriptor) means that this is no lifeline.
    while matches!(rustix::io::read(io::stdin(), &mut byte), Ok(1..) | Err(Errno::INTR)) {}
    // SIGKILL, not `exit`: exit handlers of a driver wait for locks that a thread inside the driver holds.
    let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::KILL);
}
