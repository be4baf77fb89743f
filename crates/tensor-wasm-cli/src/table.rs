//! Tables and fields for people; `--json` is for programs. No colours and no frames, on a terminal or not: columns are
//! cut and grepped.

use comfy_table::{ContentArrangement, Table, presets};
use serde_json::Value;

use crate::output::{outln, printable};

pub(crate) fn print(headers: &[&str], rows: &[Vec<String>]) {
    for line in lines(headers, rows) {
        outln!("{line}");
    }
}

fn lines(headers: &[&str], rows: &[Vec<String>]) -> Vec<String> {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled).set_header(headers);
    for row in rows {
        // A row is a line, whatever a guest put into its error message.
        table.add_row(row.iter().map(|cell| printable(cell).replace(['\n', '\t'], " ")));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.lines().map(|line| line.trim_end().to_owned()).collect()
}

pub(crate) fn print_json(value: &Value) {
    outln!("{}", serde_json::to_string_pretty(value).unwrap_or_default());
}

/// A field as a person reads it.
pub(crate) fn field(value: &Value, name: &str) -> String {
    match &value[name] {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The beginning of a hash or id: enough to name it again.
pub(crate) fn short(text: &str) -> String {
    text.chars().take(12).collect()
}

/// How long ago a time in milliseconds was.
pub(crate) fn ago(ms: &Value) -> String {
    let Some(then) = ms.as_u64() else { return String::new() };
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let seconds = now.as_secs().saturating_sub(then / 1000);
    match seconds {
        0..60 => format!("{seconds} s ago"),
        60..3600 => format!("{} min ago", seconds / 60),
        3600..86_400 => format!("{} h ago", seconds / 3600),
        _ => format!("{} d ago", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_by_what_is_seen_and_rows_stay_lines() {
        let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
        let rows = [row(["漢字", "two\nlines", ""]), row(["a", "\u{1b}[31m", "end"])];
        assert_eq!(
            lines(&["NAME", "WHAT", "LAST"], &rows),
            ["NAME  WHAT        LAST", "漢字  two lines", "a     \\u{1b}[31m  end"]
        );
        assert_eq!(lines(&["NAME", ""], &[]), ["NAME"]);
    }
}
