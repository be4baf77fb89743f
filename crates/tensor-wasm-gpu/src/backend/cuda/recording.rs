//! A graph while it is recorded: by capturing what is put on a stream that nobody else has. Steps come one after the
//! other unless whoever records says which they come after; then those that do not depend on each other are branches of
//! the graph, which the device runs side by side. Small kernels gain most: a step of one takes a microsecond or two, of
//! which most is waiting for the one before.

use std::ptr::{null, null_mut};

use cudarc::driver::sys as cu;

use super::driver::check;
use super::queues;
use crate::backend::no_such_step;
use crate::error::DeviceError;

pub(super) struct Recording {
    /// What is recorded goes here.
    pub stream: cu::CUstream,
    /// The nodes that each step ended with, once a step is said to come after others.
    steps: Vec<Vec<cu::CUgraphNode>>,
    is_branched: bool,
}

impl Recording {
    pub(super) fn begin(green: Option<cu::CUgreenCtx>) -> Result<Recording, DeviceError> {
        const RELAXED: cu::CUstreamCaptureMode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let stream = queues::new_recording(green)?;
        let recording = Recording { stream, steps: Vec::new(), is_branched: false };
        // SAFETY: a stream of ours that is not capturing.
        check(unsafe { cu::cuStreamBeginCapture_v2(stream, RELAXED) }).map(|()| recording)
    }

    /// The next step comes after some of those before.
    pub(super) fn branch(&mut self, after: &[usize]) -> Result<(), DeviceError> {
        const SET: cu::CUstreamUpdateCaptureDependencies_flags =
            cu::CUstreamUpdateCaptureDependencies_flags::CU_STREAM_SET_CAPTURE_DEPENDENCIES;
        // What was put on the stream since the last time is a step.
        if self.is_branched {
            self.steps.push(self.last_nodes()?);
        }
        self.is_branched = true;
        let mut nodes: Vec<cu::CUgraphNode> = Vec::new();
        for step in after {
            nodes.extend(self.steps.get(*step).ok_or_else(|| no_such_step(*step, self.steps.len()))?);
        }
        nodes.sort_unstable();
        nodes.dedup();
        // SAFETY: the stream is capturing, and the nodes are of the graph that it captures.
        check(unsafe {
            cu::cuStreamUpdateCaptureDependencies(self.stream, nodes.as_mut_ptr(), nodes.len(), SET as u32)
        })
    }

    /// The nodes that whatever is captured next would come after.
    fn last_nodes(&self) -> Result<Vec<cu::CUgraphNode>, DeviceError> {
        let mut status = cu::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut nodes, mut count) = (null(), 0);
        // SAFETY: writes to variables of ours. The nodes are the driver's until something else is captured, and copied
        // before.
        unsafe {
            check(cu::cuStreamGetCaptureInfo_v2(
                self.stream,
                &mut status,
                null_mut(),
                null_mut(),
                &mut nodes,
                &mut count,
            ))?;
            if count == 0 || nodes.is_null() {
                return Ok(Vec::new());
            }
            Ok(std::slice::from_raw_parts(nodes, count).to_vec())
        }
    }

    /// Ends the recording and makes something of it that can be launched.
    pub(super) fn end(self) -> Result<cu::CUgraphExec, DeviceError> {
        let (mut graph, mut exec) = (null_mut(), null_mut());
        // SAFETY: the stream is capturing, and nobody else has it; the graph is ours and destroyed once it has been
        // instantiated or not.
        unsafe {
            check(cu::cuStreamEndCapture(self.stream, &mut graph))?;
            let made = check(cu::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
            check(cu::cuGraphDestroy(graph)).and(made)
        }
        .map(|()| exec)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        queues::destroy(self.stream);
    }
}
