//! The byte-level tokenizer that made the rows, and their notation.

use fovea_kv::RoutingView;
use serde_json::Value;

/// Special tokens of all families; everything else is bytes to the tokenizer that made the rows.
const SPECIAL: &[&str] = &[
    "<|image_pad|>",
    "<image>",
    "</image>",
    "<|image|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|patch|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
    "<|image>",
    "<image|>",
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<|endoftext10|>",
    "<|media_pad|>",
    "<fake_token_around_image>",
    "<global-img>",
    "<image_id>",
    "</image_id>",
    "<slice>",
    "</slice>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|video_pad|>",
    "]<]start of image[>[",
    "]<]image[>[",
    "]<]end of image[>[",
];

/// Ids of bytes come first, then special tokens, then `<row_R_col_C>`, then one to four line breaks, for which Gemma 3's tokenizer
/// has tokens; rows show them as text.
const FIRST_SPECIAL: u32 = 256;
const FIRST_PLACE: u32 = 1000;
const PLACES: u32 = 100;
const LINES: u32 = 20_000;
const LINES_MAX: usize = 4;

/// The tokenizer that made the rows.
pub struct Tokenizer {
    names: Vec<(String, u32)>,
}

impl Tokenizer {
    pub fn new() -> Self {
        let special = (FIRST_SPECIAL..).zip(SPECIAL).map(|(id, text)| ((*text).to_owned(), id));
        let places =
            (0..PLACES * PLACES).map(|n| (format!("<row_{}_col_{}>", n / PLACES + 1, n % PLACES + 1), FIRST_PLACE + n));
        Self { names: special.chain(places).collect() }
    }

    pub fn encode(&self, mut text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        while let Some(first) = text.bytes().next() {
            let lines = text.bytes().take(LINES_MAX).take_while(|byte| *byte == b'\n').count();
            let special = if matches!(first, b'<' | b'[' | b']') { self.special_at(text) } else { None };
            let (len, id) = match special {
                Some((name, id)) => (name.len(), *id),
                None if lines > 0 => (lines, LINES + lines as u32),
                None => (1, first.into()),
            };
            assert!(text.is_char_boundary(len), "texts of families are ASCII");
            ids.push(id);
            text = &text[len..];
        }
        ids
    }

    fn special_at(&self, text: &str) -> Option<&(String, u32)> {
        self.names.iter().filter(|(name, _)| text.starts_with(name)).max_by_key(|(name, _)| name.len())
    }

    /// A special token's name, or the text of any other.
    fn show(&self, id: u32) -> Result<&str, String> {
        if let Some((name, _)) = self.names.iter().find(|(_, known)| *known == id) {
            return Ok(name);
        }
        match u8::try_from(id) {
            Ok(byte) => Err(char::from(byte).to_string()),
            Err(_) => Err("\n".repeat((id - LINES) as usize)),
        }
    }

    /// Special tokens and quoted texts of a prompt, equal neighbours counted, repeated blocks folded; and its length.
    pub fn describe(&self, view: &RoutingView) -> (String, usize) {
        let (mut items, mut text, mut total) = (Vec::<(String, u32)>::new(), String::new(), 0);
        for run in view.runs() {
            match self.show(run.token) {
                Ok(name) => {
                    flush(&mut text, &mut items);
                    total += run.count as usize;
                    items.push((name.to_owned(), run.count));
                }
                Err(piece) => {
                    total += piece.len() * run.count as usize;
                    text.push_str(&piece.repeat(run.count as usize));
                }
            }
        }
        flush(&mut text, &mut items);
        let one = |(name, count): &(String, u32)| if *count > 1 { format!("{name}*{count}") } else { name.clone() };
        (fold(&items.iter().map(one).collect::<Vec<_>>()), total)
    }
}

fn flush(text: &mut String, items: &mut Vec<(String, u32)>) {
    if !text.is_empty() {
        items.push((Value::from(std::mem::take(text)).to_string(), 1));
    }
}

/// Longest repeated blocks first, as the tool that made the rows writes them.
fn fold(items: &[String]) -> String {
    let (mut out, mut at) = (Vec::new(), 0);
    while at < items.len() {
        let rest = &items[at..];
        let mut best = (0, 0);
        for period in 1..=40.min(rest.len() / 2) {
            let block = &rest[..period];
            let count = rest.chunks_exact(period).take_while(|chunk| *chunk == block).count();
            if count > 1 && count * period > best.0 * best.1 {
                best = (count, period);
            }
        }
        if best.0 * best.1 > 2 {
            out.push(format!("({})*{}", rest[..best.1].join(" "), best.0));
            at += best.0 * best.1;
        } else {
            out.push(rest[0].clone());
            at += 1;
        }
    }
    out.join(" ")
}
