//! Texts that expansions are made of, and the ids that a model's tokenizer gives them.

use super::ConfigError;

/// One text of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Word(u16);

/// The image's own position in the prompt, from 0, written in digits.
pub(super) const POSITION: Word = Word(u16::MAX);

/// Positions whose digits are encoded when a model is loaded. No engine takes more images in one request by default.
const POSITIONS_MAX: usize = 256;

enum Source {
    /// Id of the model's config.
    Given(u32),
    /// One token of the vocabulary, else the id of the config.
    Token(Option<u32>),
    /// Whatever the tokenizer makes of it.
    Text,
}

/// All texts of one model, as its family names them.
#[derive(Default)]
pub(super) struct Words {
    list: Vec<(String, Source)>,
    positions: bool,
}

/// Their ids.
pub(super) struct Ids {
    words: Vec<Box<[u32]>>,
    positions: Vec<Box<[u32]>>,
}

impl Words {
    fn add(&mut self, text: String, source: Source) -> Word {
        debug_assert!(self.list.len() < usize::from(u16::MAX), "families bound their grids");
        self.list.push((text, source));
        Word((self.list.len() - 1) as u16)
    }

    /// A token whose id may stand in the config; else it is looked up in the vocabulary.
    pub fn own(&mut self, id: Option<u32>, text: &str) -> Word {
        self.add(text.to_owned(), id.map_or(Source::Token(None), Source::Given))
    }

    /// A token of the vocabulary; the config's id counts only where the vocabulary has none.
    pub fn token_or(&mut self, text: &str, id: Option<u32>) -> Word {
        self.add(text.to_owned(), Source::Token(id))
    }

    /// A token of the vocabulary.
    pub fn token(&mut self, text: &str) -> Word {
        self.token_or(text, None)
    }

    /// Any text. It must stand between special tokens, so that the tokenizer sees it alone.
    pub fn text(&mut self, text: impl Into<String>) -> Word {
        self.add(text.into(), Source::Text)
    }

    /// The image's own position.
    pub fn position(&mut self) -> Word {
        self.positions = true;
        POSITION
    }

    /// Whether the only text is a single token, so that nothing can merge.
    pub fn are_pads(&self) -> bool {
        self.list.len() <= 1
    }

    pub fn write(&self, word: Word, index: usize, out: &mut String) {
        match self.list.get(usize::from(word.0)) {
            Some((text, _)) => out.push_str(text),
            None => out.push_str(&index.to_string()),
        }
    }

    pub fn resolve(&self, encode: &mut impl FnMut(&str) -> Option<Vec<u32>>) -> Result<Ids, ConfigError> {
        let words = self.list.iter().map(|(text, source)| match source {
            Source::Given(id) => Ok([*id].into()),
            Source::Token(fallback) => match (encode(text).as_deref(), fallback) {
                (Some([one]), _) | (_, Some(one)) => Ok([*one].into()),
                _ => Err(ConfigError::NotOneToken { text: text.clone() }),
            },
            Source::Text => encode_text(text, encode),
        });
        let words = words.collect::<Result<_, _>>()?;
        let positions = 0..if self.positions { POSITIONS_MAX } else { 0 };
        let positions = positions.map(|n| encode_text(&n.to_string(), encode)).collect::<Result<_, _>>()?;
        Ok(Ids { words, positions })
    }
}

impl Ids {
    /// `None` for the position of an image beyond those that are encoded.
    pub fn get(&self, word: Word, index: usize) -> Option<&[u32]> {
        let ids = if word == POSITION { self.positions.get(index) } else { self.words.get(usize::from(word.0)) };
        ids.map(|ids| &ids[..])
    }
}

pub(super) fn encode_text(
    text: &str,
    encode: &mut impl FnMut(&str) -> Option<Vec<u32>>,
) -> Result<Box<[u32]>, ConfigError> {
    let ids = encode(text).filter(|ids| !ids.is_empty());
    ids.map(Into::into).ok_or_else(|| ConfigError::Vocabulary { text: text.to_owned() })
}
