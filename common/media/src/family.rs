//! What an image becomes in the prompt, by model family. All numbers come from the model's own files; class defaults of
//! transformers 5.19 stand in for absent fields. The structure is that of vLLM 0.32's prompt updates, read in its source.
//!
//! One file per family or shared rule. A new family is a new file and its lines in [`FAMILIES`].
//!
//! **Invariant:** a model whose tokenizer does not make the expected tokens of a family is an error, not a guess.

mod deepseek_ocr;
mod deepseek_ocr2;
mod fields;
mod gemma3;
mod gemma4;
mod glm4v;
mod glm5_next;
mod idefics3;
mod internvl;
mod kimi_k25;
mod kimi_vl;
mod lfm2_vl;
mod llama4;
mod llava;
mod llava_next;
mod llava_onevision;
mod minicpmv4_6;
mod minimax_m3;
mod newlines;
mod paligemma;
mod patches;
mod phi4;
mod pins;
mod pixtral;
mod qwen2_vl;
mod qwen3_vl;
mod sampling;
mod shape;
mod smart_resize;
mod tiles;
mod video;
mod words;

#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use fovea_kv::RoutingView;
use serde_json::Value;

use fields::Fields;
pub(crate) use newlines::Newlines;
pub use patches::PatchRule;
pub use sampling::{Loader, Sampled, Unsampled, VideoIo};
pub use shape::Shape;
use shape::Size;
pub use video::{Video, VideoModel, VideoShape};
use words::{Ids, Word, Words};

/// Reads one family's rule from its files and names the texts that its expansion is made of.
type Build = fn(&Fields<'_>, &mut Words) -> Result<Family, ConfigError>;

/// Families by `model_type` of config.json.
const FAMILIES: &[(&str, Build)] = &[
    ("qwen2_vl", qwen2_vl::model),
    ("qwen2_5_vl", qwen2_vl::model),
    ("qwen3_vl", qwen3_vl::model),
    ("qwen3_vl_moe", qwen3_vl::model),
    ("qwen3_5", qwen3_vl::model),
    ("qwen3_5_moe", qwen3_vl::model),
    ("llava", llava::model),
    ("llava_next", llava_next::model),
    ("llava_onevision", llava_onevision::model),
    ("llama4", llama4::model),
    ("gemma3", gemma3::model),
    ("gemma4", gemma4::model),
    ("internvl", internvl::model),
    ("internvl_chat", internvl::chat),
    ("pixtral", pixtral::pixtral),
    ("mistral3", pixtral::mistral3),
    ("phi4_multimodal", phi4::model),
    ("phi4mm", phi4::remote_code),
    ("kimi_k25", kimi_k25::model),
    ("kimi_vl", kimi_vl::model),
    ("glm4v", glm4v::model),
    ("glm4v_moe", glm4v::model),
    ("glm46v", glm4v::model),
    ("glm5_next", glm5_next::model),
    ("idefics3", idefics3::model),
    ("smolvlm", idefics3::model),
    ("lfm2_vl", lfm2_vl::model),
    ("minicpmv4_6", minicpmv4_6::model),
    ("deepseek_ocr", deepseek_ocr::model),
    ("deepseek_ocr2", deepseek_ocr2::model),
    ("deepseek_vl_v2", deepseek_ocr::by_architecture),
    ("minimax_m3_vl", minimax_m3::model),
    ("paligemma", paligemma::model),
];

/// The files of one model, as far as it has them.
#[derive(Clone, Copy, Debug)]
pub struct ModelFiles<'a> {
    /// `config.json`
    pub config: &'a Value,
    /// `preprocessor_config.json`
    pub preprocessor: Option<&'a Value>,
    /// `processor_config.json`; an `image_processor` in it stands before the preprocessor file.
    pub processor: Option<&'a Value>,
    /// `mm_processor_kwargs`: the server's, with the request's on top.
    pub kwargs: Option<&'a Value>,
}

/// What a family gives for one model, its texts not yet turned into ids.
struct Family {
    target: Target,
    /// What a template without media parts gets in front of the text for one image (vLLM's `get_placeholder_str`).
    image_text: &'static str,
    rule: Arc<Rule>,
    /// The tokenizer joins line breaks at the edges of an expansion with those around it.
    newlines: bool,
}

/// Turns a size into what one image becomes.
type Rule = dyn Fn(Size, &mut Shape) -> Result<(), Refused> + Send + Sync;

/// What the expansion of an image replaces.
enum Target {
    Word(Word),
    /// A text with the 1-based position of the image, which replaces `#`.
    Numbered(&'static str),
    /// Nothing: where the image goes cannot be told from the prompt.
    Nowhere,
}

impl Family {
    fn new(
        target: Target,
        image_text: &'static str,
        rule: impl Fn(Size, &mut Shape) -> Result<(), Refused> + Send + Sync + 'static,
    ) -> Self {
        Self { target, image_text, rule: Arc::new(rule), newlines: false }
    }

    /// A family whose placeholder is simply repeated.
    fn pads(
        pad: Word,
        image_text: &'static str,
        tokens: impl Fn(Size) -> Result<u64, Refused> + Send + Sync + 'static,
    ) -> Self {
        Self::new(Target::Word(pad), image_text, move |size, out| {
            out.features(pad, tokens(size)?);
            Ok(())
        })
    }
}

/// Images numbered in the prompt, at most (vLLM's Phi-4-multimodal names 100 of them).
const NUMBERED_MAX: usize = 100;

/// What the prompt holds for an image before expansion, in tokens.
#[derive(Clone)]
enum Placeholder {
    Same(Box<[u32]>),
    Numbered(Box<[Box<[u32]>]>),
    Nowhere,
}

/// What the balancer needs of one vision model.
#[derive(Clone)]
pub struct VisionModel {
    model_type: &'static str,
    placeholder: Placeholder,
    image_text: &'static str,
    rule: Arc<Rule>,
    ids: Arc<Ids>,
    newlines: Option<Newlines>,
}

impl fmt::Debug for VisionModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VisionModel").field("model_type", &self.model_type).finish_non_exhaustive()
    }
}

/// Why a model's files give no rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("config.json: model_type `{model_type}` has no image rule: its images cannot be predicted")]
    UnknownModelType { model_type: String },
    #[error("{file}: {field} is missing: take the file from the model's publisher")]
    Missing { file: &'static str, field: &'static str },
    #[error("{file}: {field} must be {expected}")]
    Invalid { file: &'static str, field: &'static str, expected: &'static str },
    #[error("{field} differs from {other}: engines would not agree with themselves")]
    Conflict { field: &'static str, other: &'static str },
    #[error("mm_processor_kwargs: effect of `{key}` is not known: leave it out to have images predicted")]
    UnknownOption { key: String },
    #[error("tokenizer has no single token for `{text}`: take its file from the model's publisher")]
    NotOneToken { text: String },
    #[error("tokenizer cannot encode `{text}` as the image rule expects")]
    Vocabulary { text: String },
}

/// Why an engine refuses an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("image has no pixels ({width}x{height})")]
    Empty { width: u32, height: u32 },
    #[error("image of {width}x{height} is more than {max} times as long as wide: crop or pad it")]
    AspectRatio { width: u32, height: u32, max: u32 },
    /// `formula` = tokens by vLLM's own formula, which its processor then does not get to use.
    #[error("image of {width}x{height} is too thin to be scaled: crop or pad it")]
    TooThin { width: u32, height: u32, formula: u64 },
    #[error("image of {width}x{height} would fill too many tokens: scale it down")]
    TooManyTokens { width: u32, height: u32 },
    #[error("video has {frames} frames, fewer than {min}: give a longer one")]
    TooFewFrames { frames: u32, min: u32 },
}

/// Sizes at which the expansion is compared with what the tokenizer makes of its text: one tile, and several each way.
const SAMPLES: [(u32, u32); 6] = [(64, 64), (448, 448), (1000, 1000), (2000, 500), (500, 2000), (4000, 3000)];

impl VisionModel {
    /// Reads the rule from a model's files and its texts' ids from its tokenizer. `encode` gives the ids of a text, special
    /// tokens in it parsed as such and none added.
    ///
    /// # Errors
    /// When the family is unknown, a field is of the wrong type or missing without a default, or the tokenizer does not fit.
    pub fn from_files(
        files: &ModelFiles<'_>,
        mut encode: impl FnMut(&str) -> Option<Vec<u32>>,
    ) -> Result<Self, ConfigError> {
        let fields = Fields::new(files)?;
        let wanted = fields.model_type()?;
        let family = FAMILIES.iter().find(|(name, _)| *name == wanted);
        let (model_type, build) =
            family.ok_or_else(|| ConfigError::UnknownModelType { model_type: wanted.to_owned() })?;
        let mut words = Words::default();
        let family = build(&fields, &mut words)?;
        fields.all_options_known()?;
        let ids = words.resolve(&mut encode)?;
        let placeholder = match family.target {
            Target::Word(word) => Placeholder::Same(ids.get(word, 0).unwrap_or_default().into()),
            Target::Numbered(text) => {
                let number = |n: usize| words::encode_text(&text.replace('#', &n.to_string()), &mut encode);
                Placeholder::Numbered((1..=NUMBERED_MAX).map(number).collect::<Result<_, _>>()?)
            }
            Target::Nowhere => Placeholder::Nowhere,
        };
        let newlines = family.newlines.then(|| Newlines::new(&mut encode)).transpose()?;
        let image_text = family.image_text;
        let model = Self { model_type, placeholder, image_text, rule: family.rule, ids: Arc::new(ids), newlines };
        model.check_samples(&words, &mut encode)?;
        Ok(model)
    }

    /// vLLM encodes the text of an expansion as a whole; we put it together from parts. They must agree.
    fn check_samples(
        &self,
        words: &Words,
        encode: &mut impl FnMut(&str) -> Option<Vec<u32>>,
    ) -> Result<(), ConfigError> {
        if words.are_pads() {
            return Ok(());
        }
        let shapes = SAMPLES.iter().filter_map(|&(width, height)| self.measure(width, height).ok());
        for (index, shape) in shapes.enumerate() {
            let (text, ids) = shape.sample(words, &self.ids, index);
            if encode(&text) != Some(ids) {
                return Err(ConfigError::Vocabulary { text: text.chars().take(80).collect() });
            }
        }
        Ok(())
    }

    /// Text that stands for one image when a template takes message content as a string; empty when the template must bring its
    /// own. `None` when it differs from image to image.
    pub fn image_text(&self, images: usize) -> Option<&'static str> {
        (images <= 1 || !matches!(self.placeholder, Placeholder::Numbered(_))).then_some(self.image_text)
    }

    /// Where in `tokens` the placeholder of the image at `index` (from 0) first stands.
    pub fn placeholder(&self, tokens: &[u32], index: usize) -> Option<Range<usize>> {
        let wanted = match &self.placeholder {
            Placeholder::Same(ids) => ids,
            Placeholder::Numbered(all) => all.get(index)?,
            Placeholder::Nowhere => return None,
        };
        let at = match &wanted[..] {
            [] => None,
            [one] => tokens.iter().position(|token| token == one),
            several => tokens.windows(several.len()).position(|window| window == several),
        };
        at.map(|at| at..at + wanted.len())
    }

    /// Where in `tokens` the image at `index` (from 0) of `all` goes. `None` unless there is a place for each of them: without, vLLM
    /// refuses the request, or takes another way when a placeholder has several tokens.
    pub fn place(&self, tokens: &[u32], index: usize, all: usize) -> Option<usize> {
        let (mut end, mut found) = (0, None);
        for image in 0..all {
            let place = self.placeholder(&tokens[end..], image)?;
            if image == index {
                found = Some(end + place.start);
            }
            end += place.end;
        }
        found
    }

    /// What an image of the size that the engine sees becomes.
    ///
    /// # Errors
    /// When the engine refuses such an image.
    pub fn measure(&self, width: u32, height: u32) -> Result<Shape, Refused> {
        if width == 0 || height == 0 {
            return Err(Refused::Empty { width, height });
        }
        let mut shape = Shape::default();
        (self.rule)(Size { width, height }, &mut shape)?;
        if shape.tokens() == 0 {
            return Err(Refused::TooThin { width, height, formula: 0 });
        }
        if shape.overflows() {
            return Err(Refused::TooManyTokens { width, height });
        }
        Ok(shape)
    }

    /// Feature tokens of an image: the positions that its embeddings fill.
    ///
    /// # Errors
    /// When the engine refuses such an image.
    pub fn image_tokens(&self, width: u32, height: u32) -> Result<u32, Refused> {
        self.measure(width, height).map(|shape| shape.tokens())
    }

    /// Appends the tokens of the image at `index` (from 0); false, with part of them, when images of that index have no ids.
    pub(crate) fn push(&self, shape: &Shape, index: usize, view: &mut RoutingView) -> bool {
        shape.pieces().iter().all(|piece| {
            let Some(ids) = self.ids.get(piece.word, index) else { return false };
            match ids {
                [one] => view.push(*one, piece.count),
                several => (0..piece.count).for_each(|_| several.iter().for_each(|id| view.push(*id, 1))),
            }
            true
        })
    }

    pub(crate) fn newlines(&self) -> Option<Newlines> {
        self.newlines
    }
}
