//! `cargo xtask results`: every recorded comparison, those that fall short first.

use anyhow::Context;
use serde_json::Value;

use crate::root;

pub(crate) fn print() -> anyhow::Result<()> {
    let mut rows = Vec::new();
    let dir = root().join("bench-results");
    let mut files = Vec::new();
    for folder in [dir.clone(), dir.join("h200")] {
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        files.extend(entries.flatten().map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "json")));
    }
    files.sort();
    for file in files {
        let text = std::fs::read_to_string(&file)?;
        let parsed: Value = serde_json::from_str(&text).with_context(|| file.display().to_string())?;
        let name = file.strip_prefix(&dir).unwrap_or(&file).display().to_string();
        for row in parsed["rows"].as_array().into_iter().flatten() {
            rows.push((row["holds"].as_bool().unwrap_or(false), name.clone(), row.clone()));
        }
    }
    rows.sort_by_key(|(holds, ..)| *holds);
    let number = |v: &Value| v.as_f64().map_or_else(|| "-".to_owned(), |n| format!("{n:.3}"));
    println!(
        "{:<5} {:<44} {:>12} {:>12} {:>8} {:>9}  {:<10} file",
        "holds", "id", "ours", "baseline", "ratio", "goal", "unit"
    );
    for (holds, file, row) in &rows {
        let text = |key: &str| row[key].as_str().unwrap_or("").to_owned();
        println!(
            "{:<5} {:<44} {:>12} {:>12} {:>8} {:>9}  {:<10} {file}",
            if *holds { "yes" } else { "NO" },
            text("id"),
            number(&row["ours"]),
            number(&row["baseline"]),
            number(&row["ratio"]),
            text("goal"),
            text("unit"),
        );
    }
    let short = rows.iter().filter(|(holds, ..)| !holds).count();
    println!("{} results, {short} fall short of their goal", rows.len());
    Ok(())
}

/// A number as the papers write it.
pub(crate) fn number(value: &Value) -> String {
    match value.as_f64() {
        Some(n) if n.abs() >= 100.0 => format!("{n:.0}"),
        Some(n) => format!("{n:.2}"),
        None => "–".to_owned(),
    }
}

/// One row as `docs/PERFORMANCE.md` quotes it.
pub(crate) fn line(row: &Value) -> String {
    let text = |key: &str| row[key].as_str().unwrap_or("–").to_owned();
    format!(
        "| `{}` | {} {} | {} {} | {} | {} | {} |",
        text("id"),
        number(&row["ours"]),
        text("unit"),
        text("baseline_name"),
        number(&row["baseline"]),
        number(&row["ratio"]),
        text("goal"),
        if row["holds"].as_bool().unwrap_or(false) { "yes" } else { "**no**" },
    )
}

/// Every row of every file as the table of `docs/PERFORMANCE.md`.
pub(crate) fn markdown() -> anyhow::Result<()> {
    println!("| id | ours | baseline, same run | ratio | goal | holds |\n|---|---|---|---|---|---|");
    let mut files: Vec<_> = std::fs::read_dir(root().join("bench-results"))?.flatten().map(|e| e.path()).collect();
    files.extend(std::fs::read_dir(root().join("bench-results/h200"))?.flatten().map(|e| e.path()));
    files.sort();
    for file in files.iter().filter(|p| p.extension().is_some_and(|e| e == "json")) {
        let parsed: Value = serde_json::from_str(&std::fs::read_to_string(file)?)?;
        parsed["rows"].as_array().into_iter().flatten().for_each(|row| println!("{}", line(row)));
    }
    Ok(())
}
