use std::collections::BTreeMap;
use std::process::ExitCode;

use serde_json::Value;

use crate::client::{Client, segment};
use crate::table::{ago, field, print, print_json, short};
use crate::{Ended, Global};

/// The longest setting shown in the table; `--json` has all of it.
const SHOWN_CHARS_MAX: usize = 32;

/// List a function's revisions, newest first, and what each changed in the settings.
#[derive(clap::Args)]
pub(crate) struct Revisions {
    /// The function's name or id.
    name: String,
}

impl Revisions {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        let revisions = Client::new(global).get(&format!("/functions/{}/revisions", segment(&self.name)))?;
        if global.json {
            print_json(&revisions);
            return Ok(ExitCode::SUCCESS);
        }
        let revisions = revisions.as_array().map_or(&[][..], Vec::as_slice);
        let none = Value::Null;
        let row = |(at, r): (usize, &Value)| {
            let traffic = format!("{:.0} %", r["traffic_percent"].as_f64().unwrap_or(0.0));
            let state = if r["quarantined"].is_null() { "good" } else { "quarantined" };
            let before = revisions.get(at + 1).unwrap_or(&none);
            let bytes = if r["source"] == before["source"] { "same".to_owned() } else { field(r, "bytes") };
            vec![
                short(&field(r, "revision")),
                traffic,
                field(r, "kind"),
                bytes,
                ago(&r["created_ms"]),
                state.to_owned(),
                changes(&before["settings"], &r["settings"]),
            ]
        };
        let rows: Vec<_> = revisions.iter().enumerate().map(row).collect();
        print(&["REVISION", "TRAFFIC", "KIND", "BYTES", "DEPLOYED", "STATE", "SETTINGS CHANGED"], &rows);
        Ok(ExitCode::SUCCESS)
    }
}

/// What differs between two revisions' settings: `public`, `deadline_ms=200`, `-env.OLD`.
fn changes(before: &Value, after: &Value) -> String {
    let (before, after) = (flat(before), flat(after));
    let gone = before.keys().filter(|key| !after.contains_key(*key)).map(|key| format!("-{key}"));
    let differs = after.iter().filter(|(key, value)| before.get(*key) != Some(value));
    let new = differs.map(|(key, value)| if value == "true" { key.clone() } else { format!("{key}={value}") });
    let all: Vec<String> = new.chain(gone).collect();
    if all.is_empty() { "-".to_owned() } else { all.join(", ") }
}

/// Settings as a person reads them; variables of the environment by name, as `env.NAME`.
fn flat(settings: &Value) -> BTreeMap<String, String> {
    let mut flat = BTreeMap::new();
    for (key, value) in settings.as_object().into_iter().flatten() {
        match value.as_object() {
            Some(variables) => {
                flat.extend(variables.iter().map(|(name, value)| (format!("{key}.{name}"), shown(value))));
            }
            None => drop(flat.insert(key.clone(), shown(value))),
        }
    }
    flat
}

fn shown(value: &Value) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let plain: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    match plain.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &plain[..end]),
        None => plain,
    }
}
