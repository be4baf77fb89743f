use std::process::ExitCode;

use serde_json::json;
use ureq::http::Method;

use crate::client::{Client, segment};
use crate::output::outln;
use crate::table::{field, print_json, short};
use crate::{Ended, Failed, Global};

/// Split a function's traffic between two revisions, as in `split hello 3fa=90 81c=10`.
#[derive(clap::Args)]
pub(crate) struct Split {
    /// The function's name or id.
    name: String,
    /// A revision (or the beginning of one) and its weight; one or two of them.
    #[arg(required = true, num_args = 1..=2, value_name = "REVISION=WEIGHT")]
    shares: Vec<String>,
}

impl Split {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        let share = |text: &String| {
            let parsed =
                text.split_once('=').and_then(|(revision, weight)| Some((revision, weight.parse::<u32>().ok()?)));
            let wrong = || Failed::Usage(format!("{text:?}: give it as REVISION=WEIGHT, as in 3fa=90"));
            parsed.map(|(revision, weight)| json!({ "revision": revision, "weight": weight })).ok_or_else(wrong)
        };
        let shares = self.shares.iter().map(share).collect::<Result<Vec<_>, _>>()?;
        let path = format!("/functions/{}/traffic", segment(&self.name));
        let function = Client::new(global).with_json(Method::PUT, &path, &[], &json!({ "shares": shares }))?;
        if global.json {
            print_json(&function);
            return Ok(ExitCode::SUCCESS);
        }
        for share in function["traffic"].as_array().into_iter().flatten() {
            outln!("{} {}", short(&field(share, "revision")), field(share, "weight"));
        }
        Ok(ExitCode::SUCCESS)
    }
}
