//! Floats as Python prints them: shortest digits, exponent below 1e-4 and from 1e16 on.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, Output, State, escape_formatter};

/// The float in `value`, when it is one and not an integer.
pub(super) fn of(value: &Value) -> Option<f64> {
    let float = value.kind() == ValueKind::Number && !value.is_integer();
    float.then(|| f64::try_from(value.clone()).ok()).flatten()
}

/// Python's `repr` of a float.
pub(super) fn repr(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(exponent) if !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        // `{:?}` switches to exponents at the same upper bound, but lower down at 1e-5.
        _ if value.fract() == 0.0 => format!("{value:.1}"),
        _ => value.to_string(),
    }
}

/// Formatter of `{{ … }}`.
pub(super) fn format(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match of(value) {
        Some(float) => out.write_str(&repr(float)).map_err(Error::from),
        None => escape_formatter(out, state, value),
    }
}
