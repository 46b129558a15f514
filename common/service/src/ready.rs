//! The one line that a program prints on stdout when it serves, so that a caller who gave port 0 finds the ports.

use std::io::{self, Write};

/// Prints `value` as one JSON line, e.g. `{"ready":true,"http":"127.0.0.1:8080"}`.
///
/// # Errors
/// When stdout is closed.
pub fn announce(value: &serde_json::Value) -> io::Result<()> {
    write_line(&mut io::stdout().lock(), value)
}

fn write_line(out: &mut impl Write, value: &serde_json::Value) -> io::Result<()> {
    writeln!(out, "{value}")?;
    out.flush()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_announcement_is_one_line() {
        let mut out = Vec::new();
        super::write_line(&mut out, &serde_json::json!({"ready": true, "http": "a\nb"})).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "{\"ready\":true,\"http\":\"a\\nb\"}\n");
    }
}
