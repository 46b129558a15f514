//! Holds the image rules to recorded token counts: `tokens FILE` (see tests/tokens.sh).

#[path = "../tests/rows/mod.rs"]
mod rows;

use std::process::ExitCode;

use serde_json::json;

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let file = std::env::args_os().nth(1).ok_or("usage: tokens FILE")?;
    let tally = rows::check_all(&serde_json::from_slice::<Vec<_>>(&std::fs::read(file)?)?);
    tally.differences.iter().for_each(|line| eprintln!("differs: {line}"));
    println!("{}", json!({"equal": tally.equal, "rows": tally.rows, "unsupported_families": tally.unsupported}));
    let held = tally.differences.is_empty() && tally.equal == tally.rows;
    Ok(if held { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
