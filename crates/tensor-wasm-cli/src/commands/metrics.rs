use std::collections::BTreeMap;
use std::process::ExitCode;

use crate::client::Client;
use crate::output::{outln, write};
use crate::{Ended, Global};

/// Print the server's metrics (Prometheus text; with --json, an object by series).
#[derive(clap::Args)]
pub(crate) struct Metrics {}

impl Metrics {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        let page = Client::new(global).text("/metrics")?;
        if !global.json {
            write(format_args!("{page}"));
            return Ok(ExitCode::SUCCESS);
        }
        let sample = |line: &str| {
            let (series, value) = line.rsplit_once(' ')?;
            Some((series.to_owned(), value.parse::<f64>().ok()?))
        };
        let series: BTreeMap<String, f64> = page.lines().filter(|l| !l.starts_with('#')).filter_map(sample).collect();
        outln!("{}", serde_json::to_string_pretty(&series).unwrap_or_default());
        Ok(ExitCode::SUCCESS)
    }
}
