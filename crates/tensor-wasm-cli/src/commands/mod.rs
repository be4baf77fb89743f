//! One file per command, each a `clap` struct with an `execute`.

pub(crate) mod compile_worker;
pub(crate) mod completions;
pub(crate) mod delete;
pub(crate) mod deploy;
pub(crate) mod device_worker;
pub(crate) mod devices;
pub(crate) mod functions;
pub(crate) mod invoke;
pub(crate) mod jobs;
pub(crate) mod kernel;
pub(crate) mod logs;
pub(crate) mod man;
pub(crate) mod metrics;
pub(crate) mod model;
pub(crate) mod revisions;
pub(crate) mod rollback;
pub(crate) mod run;
pub(crate) mod secret;
pub(crate) mod serve;
pub(crate) mod show;
pub(crate) mod split;
pub(crate) mod tensor;
pub(crate) mod worker;
