//! Raw driver calls, for benchmarks to stand beside: what a program that has the GPU to itself and trusts everybody
//! would do. Nothing of the product uses it.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use cudarc::driver::sys as cu;
use cudarc::driver::sys::CUresult;

use crate::choice::Unavailable;

const EMPTY: &[u8] = b".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry nothing() { ret; }\n\0";

/// A context, a stream and an empty kernel.
pub struct Baseline {
    stream: cu::CUstream,
    function: cu::CUfunction,
}

fn must(result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS, "the raw baseline failed");
}

impl Baseline {
    pub fn open(index: u32) -> Result<Baseline, Unavailable> {
        let (device, _) = crate::backend::cuda::probe(index)?;
        let (mut context, mut stream, mut module, mut function) = (null_mut(), null_mut(), null_mut(), null_mut());
        // SAFETY: handles are written to variables of ours, in the order they depend on each other; the image ends with
        // a NUL.
        unsafe {
            must(cu::cuDevicePrimaryCtxRetain(&mut context, device));
            must(cu::cuCtxSetCurrent(context));
            must(cu::cuStreamCreate(&mut stream, cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32));
            must(cu::cuModuleLoadData(&mut module, EMPTY.as_ptr().cast()));
            must(cu::cuModuleGetFunction(&mut function, module, c"nothing".as_ptr()));
        }
        Ok(Baseline { stream, function })
    }

    fn launch(&self) {
        let no = null_mut();
        // SAFETY: a kernel without parameters on a stream of ours.
        must(unsafe { cu::cuLaunchKernel(self.function, 1, 1, 1, 1, 1, 1, 0, self.stream, no, no) });
    }

    fn synchronize(&self) {
        // SAFETY: a stream of ours.
        must(unsafe { cu::cuStreamSynchronize(self.stream) });
    }

    /// Launches so many empty kernels and waits for the last.
    pub fn launches(&self, count: usize) -> Duration {
        let started = Instant::now();
        (0..count).for_each(|_| self.launch());
        self.synchronize();
        started.elapsed()
    }

    /// Times copies of so many bytes, after one to warm up: to the device or from it, pinned or pageable host memory.
    pub fn copies(&self, bytes: usize, to_device: bool, pinned: bool, rounds: usize) -> Vec<Duration> {
        let mut device = 0;
        let mut host: *mut c_void = null_mut();
        let mut pageable = Vec::new();
        // SAFETY: memory is taken, used only for these copies, which are waited for, and given back.
        unsafe {
            must(cu::cuMemAlloc_v2(&mut device, bytes));
            if pinned {
                must(cu::cuMemAllocHost_v2(&mut host, bytes));
            } else {
                pageable.resize(bytes, 7_u8);
                host = pageable.as_mut_ptr().cast();
            }
            std::ptr::write_bytes(host.cast::<u8>(), 7, bytes);
            let samples = (0..=rounds).map(|_| {
                let started = Instant::now();
                must(if to_device {
                    cu::cuMemcpyHtoDAsync_v2(device, host, bytes, self.stream)
                } else {
                    cu::cuMemcpyDtoHAsync_v2(host, device, bytes, self.stream)
                });
                self.synchronize();
                started.elapsed()
            });
            let samples = samples.skip(1).collect();
            must(cu::cuMemFree_v2(device));
            if pinned {
                must(cu::cuMemFreeHost(host));
            }
            samples
        }
    }
}
