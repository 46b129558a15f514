//! Reads samples out of an engine's Prometheus page: only what is asked for, whatever else it holds.

/// One sample line: `name{label="value",…} number`.
#[derive(Debug, PartialEq)]
pub struct Sample<'a> {
    labels: &'a str,
    pub value: f64,
}

impl Sample<'_> {
    /// Value of a label, with `\"`, `\\` and `\n` undone.
    pub fn label(&self, name: &str) -> Option<String> {
        let mut rest = self.labels;
        while !rest.is_empty() {
            let (key, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            if key.trim_start_matches([',', ' ']) == name {
                return Some(value);
            }
            rest = after;
        }
        None
    }

    /// Label `engine`, vLLM's data-parallel rank; 0 when absent.
    pub fn rank(&self) -> u32 {
        self.label("engine").and_then(|text| text.parse().ok()).unwrap_or(0)
    }
}

/// Splits at the closing quote of a label value.
fn quoted(text: &str) -> Option<(String, &str)> {
    let (mut value, mut escaped) = (String::new(), false);
    for (index, c) in text.char_indices() {
        match c {
            _ if escaped => {
                value.push(if c == 'n' { '\n' } else { c });
                escaped = false;
            }
            '\\' => escaped = true,
            '"' => return Some((value, &text[index + 1..])),
            _ => value.push(c),
        }
    }
    None
}

/// All samples of exactly this metric, in the order of the page. Lines that do not parse are passed over.
pub fn samples<'a>(page: &'a str, name: &'a str) -> impl Iterator<Item = Sample<'a>> + 'a {
    page.lines().filter_map(move |line| {
        let rest = line.strip_prefix(name)?;
        let (labels, number) = match rest.strip_prefix('{') {
            Some(rest) => rest.rsplit_once('}')?,
            None => ("", rest.strip_prefix(' ').map(|_| rest)?),
        };
        let value = number.split_whitespace().next()?.parse().ok()?;
        Some(Sample { labels, value })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = include_str!("../../../tests/vectors/vllm/metrics-main-after.txt");

    #[test]
    fn a_real_page_gives_block_size_and_pool() {
        let info = samples(PAGE, "vllm:cache_config_info").next().unwrap();
        let label = |name| info.label(name).unwrap();
        assert_eq!((label("block_size"), label("num_gpu_blocks"), info.rank()), ("32".into(), "400".into(), 0));
        assert_eq!(info.label("size"), None);
    }

    #[test]
    fn a_name_is_matched_whole() {
        let waiting: Vec<_> = samples(PAGE, "vllm:num_requests_waiting").collect();
        assert_eq!(waiting.len(), 1);
        assert!(samples("vllm:x_y 1\nvllm:x 2 1700\n", "vllm:x").map(|s| s.value).eq([2.0]));
    }

    #[test]
    fn label_values_may_hold_anything() {
        let page = r#"m{a="x,b=\"1\"}",b="\\n"} 5"#;
        let sample = samples(page, "m").next().unwrap();
        assert_eq!(sample.label("a").unwrap(), r#"x,b="1"}"#);
        assert_eq!(sample.label("b").unwrap(), r"\n");
        assert_eq!(sample.value, 5.0);
    }

    #[test]
    fn broken_lines_are_passed_over() {
        for page in ["m", "m{", "m{a=\"} 1", "m{} x", "m}{ 1", ""] {
            for sample in samples(page, "m") {
                assert_eq!(sample.label("a"), None, "{page}");
            }
        }
    }
}
