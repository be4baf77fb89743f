use std::process::ExitCode;

use serde_json::Value;

use crate::client::{Client, segment};
use crate::output::{outln, printable};
use crate::table::{ago, field, print_json, short};
use crate::{Ended, Global};

/// Show a function: address, revision, traffic, settings, secrets and exports.
#[derive(clap::Args)]
pub(crate) struct Show {
    /// The function's name or id.
    name: String,
}

impl Show {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        let function = Client::new(global).get(&format!("/functions/{}", segment(&self.name)))?;
        if global.json {
            print_json(&function);
            return Ok(ExitCode::SUCCESS);
        }
        for (label, text) in facts(&function, &global.server) {
            outln!("{label:<10}{}", printable(&text));
        }
        let exports: Vec<String> = list(&function["exports"]).map(signature).collect();
        if !exports.is_empty() {
            outln!("exports");
        }
        for export in exports {
            outln!("  {}", printable(&export));
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// What is known about it, line by line; what the server does not say is left out.
fn facts(function: &Value, server: &str) -> Vec<(&'static str, String)> {
    let mut facts = vec![("name", field(function, "name")), ("tenant", field(function, "tenant"))];
    facts.push(("kind", field(function, "kind")));
    // An address by host name, or a path on the server that was asked.
    let path = || function["url"].as_str().map(|path| format!("{server}{path}"));
    facts.extend(function["address"].as_str().map(str::to_owned).or_else(path).map(|address| ("address", address)));
    let revisions = match &function["revisions"] {
        Value::Number(count) => format!(" of {count}"),
        Value::Array(all) => format!(" of {}", all.len()),
        _ => String::new(),
    };
    facts.push(("revision", format!("{}{revisions}", short(&field(function, "revision")))));
    facts.push(("created", ago(&function["created_ms"])));
    let share = |share: &Value| format!("{}={}", short(&field(share, "revision")), field(share, "weight"));
    let traffic: Vec<String> = list(&function["traffic"]).map(share).collect();
    if traffic.len() > 1 {
        facts.push(("traffic", traffic.join(" ")));
    }
    facts.extend(settings(&function["settings"]).into_iter().map(|text| ("setting", text)));
    let secrets: Vec<String> = list(&function["secrets"]).filter_map(name_of).collect();
    if !secrets.is_empty() {
        facts.push(("secrets", secrets.join(" ")));
    }
    facts.extend(function["unavailable"].as_str().map(|why| ("unavailable", why.to_owned())));
    facts.retain(|(_, text)| !text.is_empty());
    facts
}

/// A secret is its name; its value never leaves the server.
fn name_of(secret: &Value) -> Option<String> {
    secret.as_str().or_else(|| secret["name"].as_str()).map(str::to_owned)
}

/// As they are given to `deploy`.
fn settings(settings: &Value) -> Vec<String> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let one = |(name, value): (&String, &Value)| match value {
        Value::Null | Value::Bool(false) => vec![],
        Value::Bool(true) => vec![name.clone()],
        Value::Object(pairs) => pairs.iter().map(|(key, value)| format!("{name} {key}={}", text(value))).collect(),
        Value::Array(values) => values.iter().map(|value| format!("{name} {}", text(value))).collect(),
        other => vec![format!("{name} {}", text(other))],
    };
    settings.as_object().into_iter().flatten().flat_map(one).collect()
}

/// An export as WIT writes it: `area: func(of: shape) -> f64`.
fn signature(export: &Value) -> String {
    let parameter = |p: &Value| match (p["name"].as_str(), p["type"].as_str()) {
        (Some(name), Some(ty)) if !name.is_empty() => format!("{name}: {ty}"),
        (_, Some(ty)) => ty.to_owned(),
        _ => "_".to_owned(),
    };
    let parameters: Vec<String> = list(&export["params"]).map(parameter).collect();
    let results: Vec<&str> = list(&export["results"]).filter_map(Value::as_str).collect();
    let results = match results.as_slice() {
        [] => String::new(),
        [one] => format!(" -> {one}"),
        several => format!(" -> ({})", several.join(", ")),
    };
    format!("{}: func({}){results}", field(export, "name"), parameters.join(", "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_function_is_shown_with_what_the_server_says_and_no_more() {
        let function = json!({
            "name": "shapes", "tenant": "acme", "kind": "component_exports", "revision": "0123456789abcdef",
            "revisions": 2, "url": "/run/shapes/",
            "traffic": [
                { "revision": "0123456789abcdef", "weight": 9 }, { "revision": "fedcba9876543210", "weight": 1 },
            ],
            "settings": { "public": true, "reuse": false, "deadline_ms": 50, "env": { "A": "b c" }, "memory": null, "models": ["m", "n"] },
            "secrets": ["KEY", { "name": "OTHER" }],
        });
        let expected = [
            ("name", "shapes"),
            ("tenant", "acme"),
            ("kind", "component_exports"),
            ("address", "http://s/run/shapes/"),
            ("revision", "0123456789ab of 2"),
            ("traffic", "0123456789ab=9 fedcba987654=1"),
            ("setting", "deadline_ms 50"),
            ("setting", "env A=b c"),
            ("setting", "models m"),
            ("setting", "models n"),
            ("setting", "public"),
            ("secrets", "KEY OTHER"),
        ];
        let found = facts(&function, "http://s");
        let found: Vec<(&str, &str)> = found.iter().map(|(label, text)| (*label, text.as_str())).collect();
        assert_eq!(found, expected);
        assert_eq!(facts(&json!({ "name": "x", "address": "http://x.acme.localhost/" }), "http://s").len(), 2);
    }

    #[test]
    fn signatures_read_like_wit() {
        let check = |export: Value, expected: &str| assert_eq!(signature(&export), expected);
        check(
            json!({ "name": "area", "params": [{ "name": "of", "type": "shape" }], "results": ["f64"] }),
            "area: func(of: shape) -> f64",
        );
        check(
            json!({
                "name": "scale", "params": [{ "name": "", "type": "f32" }, { "type": "f64" }], "results": ["f32", "f64"],
            }),
            "scale: func(f32, f64) -> (f32, f64)",
        );
        check(json!({ "name": "nothing" }), "nothing: func()");
    }
}
