//! Headers by which a client says what its videos are, read as Go reads numbers.

/// Frames per second of the file; a positive float.
pub const VIDEO_FPS: &str = "x-llm-d-video-fps";
/// Length in s; a positive float.
pub const VIDEO_DURATION: &str = "x-llm-d-video-duration-seconds";
/// `640x360`, in pixels.
pub const VIDEO_RESOLUTION: &str = "x-llm-d-video-resolution";

/// What the headers of a request say of every video in it. A malformed one counts as absent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct VideoHints {
    /// s, above 0 and finite.
    pub duration: Option<f64>,
    /// Above 0 and finite.
    pub fps: Option<f64>,
    /// Width and height, both above 0.
    pub resolution: Option<(i64, i64)>,
}

impl VideoHints {
    /// `header` gives the value of a header by its lower-case name.
    ///
    /// Infinity counts as absent; in llm-d it overflows to a single token.
    pub fn read<'a>(header: impl Fn(&str) -> Option<&'a str>) -> Self {
        let float = |name| header(name).and_then(positive_float).filter(|value| value.is_finite());
        Self {
            duration: float(VIDEO_DURATION),
            fps: float(VIDEO_FPS),
            resolution: header(VIDEO_RESOLUTION).and_then(resolution),
        }
    }
}

/// A number above 0 in the forms of Go's `strconv.ParseFloat`: decimal or hexadecimal, underscores between digits, infinity.
pub fn positive_float(text: &str) -> Option<f64> {
    let unsigned = text.strip_prefix('+').unwrap_or(text);
    let infinite = ["inf", "infinity"].iter().any(|name| unsigned.eq_ignore_ascii_case(name));
    if infinite {
        return Some(f64::INFINITY);
    }
    // What is out of range is an error.
    number(unsigned).filter(|value| *value > 0.0 && value.is_finite())
}

fn number(text: &str) -> Option<f64> {
    let hex = text.get(..2).is_some_and(|prefix| prefix.eq_ignore_ascii_case("0x"));
    // One underscore between two digits; in a hexadecimal number also after the prefix.
    let digit = |byte: u8| {
        if hex { byte.is_ascii_hexdigit() || byte.eq_ignore_ascii_case(&b'x') } else { byte.is_ascii_digit() }
    };
    let bytes = text.as_bytes();
    let alone = |at: usize| at > 0 && digit(bytes[at - 1]) && bytes.get(at + 1).is_some_and(|&next| digit(next));
    if !(0..bytes.len()).all(|at| bytes[at] != b'_' || alone(at)) {
        return None;
    }
    let plain: String = text.chars().filter(|&c| c != '_').collect();
    if hex {
        return hexadecimal(&plain[2..]);
    }
    // Rust's own reader takes the same decimal forms, and names besides.
    let first = plain.bytes().next()?;
    if first.is_ascii_digit() || first == b'.' { plain.parse().ok() } else { None }
}

/// Mantissa, then an exponent of 2 that must be there.
fn hexadecimal(text: &str) -> Option<f64> {
    let (mantissa, exponent) = text.split_once(['p', 'P'])?;
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let written = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
    let empty = whole.is_empty() && fraction.is_empty();
    if empty || written.is_empty() || !written.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let fold = |value: f64, digit: char| Some(value * 16.0 + f64::from(digit.to_digit(16)?));
    let value = whole.chars().chain(fraction.chars()).try_fold(0.0, fold)?;
    // Beyond these the value is 0 or out of range anyway.
    let exponent = exponent.parse::<i64>().unwrap_or(if exponent.starts_with('-') { -9999 } else { 9999 });
    let shift = exponent.saturating_sub(4 * i64::try_from(fraction.len()).ok()?).clamp(-9999, 9999);
    Some(value * 2_f64.powi(i32::try_from(shift).ok()?))
}

/// Two whole numbers above 0, around the first `x` or `X`; white space around each does not matter.
pub fn resolution(text: &str) -> Option<(i64, i64)> {
    let (width, height) = text.split_once(['x', 'X'])?;
    let side = |text: &str| text.trim().parse::<i64>().ok().filter(|&side| side > 0);
    Some((side(width)?, side(height)?))
}
