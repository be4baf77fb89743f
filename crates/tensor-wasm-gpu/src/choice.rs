//! Which device to open, as a person asks for it, and why there is none.

use std::str::FromStr;

/// `auto`, `cpu`, `cuda` or `cuda:N`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// CUDA where it works, else the CPU; the reason is kept.
    #[default]
    Auto,
    Cpu,
    Cuda(u32),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || format!("{text:?} is not auto, cpu, cuda or cuda:N");
        match text.split_once(':') {
            None => match text {
                "auto" => Ok(DeviceChoice::Auto),
                "cpu" => Ok(DeviceChoice::Cpu),
                "cuda" => Ok(DeviceChoice::Cuda(0)),
                _ => Err(invalid()),
            },
            Some(("cuda", n)) => n.parse().map(DeviceChoice::Cuda).map_err(|_| invalid()),
            Some(_) => Err(invalid()),
        }
    }
}

impl std::fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DeviceChoice::Auto => f.write_str("auto"),
            DeviceChoice::Cpu => f.write_str("cpu"),
            DeviceChoice::Cuda(n) => write!(f, "cuda:{n}"),
        }
    }
}

/// Why a device cannot be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    #[error("there is no NVIDIA driver: {why}")]
    NoDriver { why: String },
    #[error("the NVIDIA driver is for CUDA {found}; at least {needed} is needed")]
    DriverTooOld { found: String, needed: String },
    #[error("the NVIDIA driver finds no device: {why}")]
    NoDevice { why: String },
    #[error("there is no device {index}: the driver knows {count}")]
    NoSuchDevice { index: u32, count: u32 },
    #[error("the NVIDIA driver does not work: {why}")]
    DriverFailed { why: String },
    #[error("the device worker did not start: {why}")]
    Worker { why: String },
    #[error("shared memory for the device cannot be had: {why}")]
    Memory { why: String },
}

/// Libraries that make some things faster where they are installed, and whether they are.
pub fn optional_libraries() -> Vec<(&'static str, bool)> {
    let names: [(&str, &[&str]); 2] =
        [("cuBLASLt", &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"]), ("NVML", &["libnvidia-ml.so.1"])];
    // SAFETY: opening a library runs its initialisers; these are NVIDIA's own and need nothing.
    let is_there = |name: &&str| unsafe { libloading::Library::new(*name) }.is_ok();
    names.iter().map(|(name, files)| (*name, files.iter().any(is_there))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_read_and_written() {
        for (text, choice) in
            [("auto", DeviceChoice::Auto), ("cpu", DeviceChoice::Cpu), ("cuda:3", DeviceChoice::Cuda(3))]
        {
            assert_eq!(text.parse(), Ok(choice));
            assert_eq!(choice.to_string(), text);
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        for bad in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:1", "auto:0"] {
            assert!(bad.parse::<DeviceChoice>().unwrap_err().contains(bad), "{bad}");
        }
    }
}
