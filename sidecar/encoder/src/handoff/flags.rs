//! Engine flags that a hand-off needs, and two ways to see whether they are set: the engine's command line, or a harmless request.

use serde_json::Value;

/// One flag that the engine must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// As on the engine's command line.
    pub flag: &'static str,
    /// Its value, for flags that have one.
    pub value: Option<String>,
    /// Fields of that JSON value that must be so; empty for flags without a value.
    pub fields: Vec<(&'static str, String)>,
    /// What happens without it.
    pub without: &'static str,
    /// Tells from the engine's answer; `None` when only the command line can tell.
    pub probe: Option<Probe>,
}

/// A request that no engine serves (its tensor is no base64), whose refusal tells whether a flag is set. vLLM 0.32 looks at the flag first;
/// read in its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    pub path: &'static str,
    /// With `MODEL` where the served model's name goes, as a JSON string without its quotes.
    pub body: &'static str,
    /// In the refusal of an engine without the flag.
    pub missing_when: &'static str,
}

/// What a probe's answer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Set,
    Missing,
    Unknown,
}

impl Probe {
    pub fn verdict(&self, status: u16, body: &[u8]) -> Verdict {
        match status {
            400 | 422 if memchr(body, self.missing_when.as_bytes()) => Verdict::Missing,
            // Refused for another reason: the flag was looked at first.
            400 => Verdict::Set,
            _ => Verdict::Unknown,
        }
    }
}

fn memchr(text: &[u8], word: &[u8]) -> bool {
    text.windows(word.len().max(1)).take(64 << 10).any(|window| window == word)
}

/// A hand-off that cannot work with this engine. Text names the flag and how to set it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    #[error("engine was started without {flag}{}: {without}; start it with that flag", shown(.value))]
    Missing { flag: &'static str, value: Option<String>, without: &'static str },
    #[error("engine's {flag} has {field} {found}, wanted {wanted}: start it with {flag}{}", shown(.value))]
    Field { flag: &'static str, field: &'static str, found: String, wanted: String, value: Option<String> },
    #[error("hand-off {mode} is for {wanted}, this engine is {found}: set encoder.handoff.mode")]
    WrongEngine { mode: &'static str, wanted: &'static str, found: &'static str },
    #[error("hand-off {mode} needs {wanted} or newer, the engine says version {found}")]
    TooOld { mode: &'static str, wanted: &'static str, found: String },
    #[error("hand-off {mode} needs a model {needs}; model_type is {model_type}")]
    Model { mode: &'static str, needs: &'static str, model_type: String },
    #[error("no hand-off fits this engine as it was started: {remedy}")]
    None { remedy: &'static str },
}

fn shown(value: &Option<String>) -> String {
    value.as_ref().map(|value| format!(" '{value}'")).unwrap_or_default()
}

/// An engine's command line, as the operator or the engine itself gives it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandLine {
    /// Flags with dashes, in order, with their value if they have one.
    flags: Vec<(String, Option<String>)>,
}

impl CommandLine {
    /// Reads arguments one by one: `--flag value`, `--flag=value` or `--flag`; underscores count as dashes, as in vLLM.
    pub fn parse<S: AsRef<str>>(arguments: &[S]) -> Self {
        let mut flags: Vec<(String, Option<String>)> = Vec::new();
        for argument in arguments.iter().map(AsRef::as_ref) {
            match argument.strip_prefix("--").filter(|name| !name.is_empty()) {
                Some(flag) => {
                    let (name, value) = flag.split_once('=').map_or((flag, None), |(name, value)| (name, Some(value)));
                    flags.push((format!("--{}", name.replace('_', "-")), value.map(str::to_owned)));
                }
                None => {
                    if let Some((_, value @ None)) = flags.last_mut() {
                        *value = Some(argument.to_owned());
                    }
                }
            }
        }
        Self { flags }
    }

    /// Whether a switch is on; the last of it and its `--no-` form counts.
    pub fn is_on(&self, flag: &str) -> bool {
        let off = format!("--no-{}", flag.trim_start_matches("--"));
        self.flags.iter().rev().find(|(name, _)| name == flag || *name == off).is_some_and(|(name, _)| name == flag)
    }

    /// Value of the last such flag.
    pub fn value(&self, flag: &str) -> Option<&str> {
        self.flags.iter().rev().find(|(name, _)| name == flag)?.1.as_deref()
    }

    /// Holds the command line to what a hand-off requires.
    ///
    /// # Errors
    /// The first flag that is missing or wrong.
    pub fn check(&self, requirements: &[Requirement]) -> Result<(), StartError> {
        requirements.iter().try_for_each(|requirement| self.check_one(requirement))
    }

    fn check_one(&self, requirement: &Requirement) -> Result<(), StartError> {
        let Requirement { flag, value, fields, without, .. } = requirement;
        let missing = || StartError::Missing { flag, value: value.clone(), without };
        let Some(wanted) = value else {
            return if self.is_on(flag) { Ok(()) } else { Err(missing()) };
        };
        let found = self.value(flag).ok_or_else(missing)?;
        if fields.is_empty() {
            let field = "value";
            let (found, wanted) = (found.to_owned(), wanted.clone());
            return if found == wanted {
                Ok(())
            } else {
                Err(StartError::Field { flag, field, found, wanted, value: value.clone() })
            };
        }
        let json: Value = serde_json::from_str(found).unwrap_or_default();
        for (field, wanted) in fields {
            let found = json.pointer(field).and_then(Value::as_str).unwrap_or("not set");
            if !wanted.split('|').any(|wanted| wanted == found) {
                let (found, wanted) = (found.to_owned(), wanted.clone());
                return Err(StartError::Field { flag, field, found, wanted, value: value.clone() });
            }
        }
        Ok(())
    }
}
