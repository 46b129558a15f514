//! `{% generation %}` marks what the model wrote, for training. It renders as its body.

/// Rewrites the tags into a condition that always holds, with the same trim marks.
pub(crate) fn rewrite(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start..].find("%}").map(|end| end + 2) else { break };
        let tag = &rest[start..start + len];
        out.push_str(&rest[..start]);
        rest = &rest[start + len..];
        let inner = &tag[2..tag.len() - 2];
        let (left, inner) = trim_mark(inner, str::strip_prefix);
        let (right, inner) = trim_mark(inner, str::strip_suffix);
        let replacement = match inner.trim() {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => {
                out.push_str(tag);
                continue;
            }
        };
        out.extend(["{%", left, " ", replacement, " ", right, "%}"]);
    }
    out.push_str(rest);
    out
}

/// Splits a `-` or `+` off one side of a tag.
fn trim_mark<'s>(inner: &'s str, strip: impl Fn(&'s str, char) -> Option<&'s str>) -> (&'static str, &'s str) {
    ["-", "+"].into_iter().find_map(|mark| Some((mark, strip(inner, mark.chars().next()?)?))).unwrap_or(("", inner))
}
