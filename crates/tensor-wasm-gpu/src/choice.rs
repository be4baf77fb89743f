//! Which devices there are, which to open, as a person asks for it, and why there is none.

use std::str::FromStr;

/// The table of backends: number in the slab, name, kind, and, where a machine may have several devices of it, an index
/// and how that is written. Sorted from what is always there to what is wanted most; `auto` tries them from the end.
macro_rules! backends {
    ($($(#[$doc:meta])* $number:literal $name:literal $kind:ident $(($index:ident: $type:ty, $form:literal))?;)+) => {
        /// What kind of device something is.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum DeviceKind {
            $($(#[$doc])* $kind,)+
        }

        impl DeviceKind {
            pub fn as_str(self) -> &'static str {
                match self {
                    $(DeviceKind::$kind => $name,)+
                }
            }

            pub(crate) fn number(self) -> u64 {
                match self {
                    $(DeviceKind::$kind => $number,)+
                }
            }

            pub(crate) fn from_number(number: u64) -> Option<DeviceKind> {
                match number {
                    $($number => Some(DeviceKind::$kind),)+
                    _ => None,
                }
            }
        }

        /// Which device to open: `auto`, `cpu`, `cuda` or `cuda:N`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub enum DeviceChoice {
            /// The best that works; why a better one did not is kept.
            #[default]
            Auto,
            $($(#[$doc])* $kind $(($type))?,)+
        }

        impl DeviceChoice {
            /// The first device of each backend.
            const FIRST: &[DeviceChoice] = &[$(DeviceChoice::$kind $((<$type>::MIN))?),+];

            /// What a person may write.
            const FORMS: &[&str] = &["auto", $($name, $($form,)?)+];
        }

        impl FromStr for DeviceChoice {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                let invalid = || format!("{text:?} is not {}", one_of(DeviceChoice::FORMS));
                match text {
                    "auto" => return Ok(DeviceChoice::Auto),
                    $($name => return Ok(DeviceChoice::$kind $((<$type>::MIN))?),)+
                    _ => {}
                }
                $($(if let Some($index) = text.strip_prefix(concat!($name, ":")) {
                    return $index.parse().map(DeviceChoice::$kind).map_err(|_| invalid());
                })?)+
                Err(invalid())
            }
        }

        impl std::fmt::Display for DeviceChoice {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self {
                    DeviceChoice::Auto => f.write_str("auto"),
                    $(DeviceChoice::$kind $(($index))? => {
                        f.write_str($name)?;
                        $(write!(f, ":{}", $index)?;)?
                        Ok(())
                    })+
                }
            }
        }
    };
}

backends! {
    /// The processor the server runs on.
    0 "cpu" Cpu;
    /// An NVIDIA GPU.
    1 "cuda" Cuda(index: u32, "cuda:N");
}

impl Default for DeviceKind {
    /// What is always there.
    fn default() -> DeviceKind {
        DeviceKind::Cpu
    }
}

impl DeviceChoice {
    /// What is tried, in this order, until one opens.
    pub(crate) fn candidates(self) -> Vec<DeviceChoice> {
        if self == DeviceChoice::Auto { DeviceChoice::FIRST.iter().rev().copied().collect() } else { vec![self] }
    }
}

/// `a, b or c`.
fn one_of(forms: &[&str]) -> String {
    match forms {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        _ => forms.concat(),
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

/// What the loader may know cuBLASLt by.
pub(crate) const CUBLASLT_NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];

/// Libraries that make some things faster where they are installed, and whether they are.
pub fn optional_libraries() -> Vec<(&'static str, bool)> {
    let names: [(&str, &[&str]); 2] = [("cuBLASLt", &CUBLASLT_NAMES), ("NVML", &["libnvidia-ml.so.1"])];
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
        assert_eq!(DeviceChoice::Auto.candidates(), [DeviceChoice::Cuda(0), DeviceChoice::Cpu]);
        assert_eq!(DeviceChoice::Cuda(2).candidates(), [DeviceChoice::Cuda(2)]);
        for bad in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:1", "auto:0"] {
            let refused = bad.parse::<DeviceChoice>().unwrap_err();
            assert!(refused.contains(bad) && refused.ends_with("is not auto, cpu, cuda or cuda:N"), "{refused}");
        }
        for kind in [DeviceKind::Cpu, DeviceKind::Cuda] {
            assert_eq!(DeviceKind::from_number(kind.number()), Some(kind));
        }
        assert_eq!(DeviceKind::from_number(u64::MAX), None);
    }
}
