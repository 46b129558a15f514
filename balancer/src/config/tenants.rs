//! `tenants:` who may ask, and how much; `access:` what becomes of keys.

use std::path::PathBuf;
use std::time::Duration;

use fovea_balancer_core::tenants::{self, Digest, Rate};
use fovea_service::config::{ByteSize, Invalid, human_duration};
use serde::Deserialize;

/// Tenants in one config: each is a label value of metrics.
const TENANTS_MAX: usize = 1024;
/// Most of anything per minute, or at once.
const UNITS_MAX: u64 = 1_000_000_000_000;
/// Longest name, in bytes.
const NAME_MAX: usize = 64;
/// Names that metrics use for what is no tenant's.
const RESERVED: [&str; 3] = ["default", "unknown", "other"];

/// One tenant: its keys, and what it may use. At least one of `keys_file`, `keys_env` and `keys_sha256` is needed.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantConfig {
    /// For metrics and logs.
    pub name: String,
    /// File with one key a line; `#` begins a comment. Read again when it changes.
    pub keys_file: Option<PathBuf>,
    /// Environment variable with keys, apart by white space.
    pub keys_env: Option<String>,
    /// SHA-256 digests of keys, in hex.
    #[serde(default)]
    pub keys_sha256: Vec<String>,
    /// Share of the queue, against other tenants' weights.
    #[serde(default = "one")]
    pub weight: u32,
    /// Its blocks and media are its own: nothing is shared with other tenants, not even how fast an answer comes.
    #[serde(default)]
    pub isolate: bool,
    /// Largest request body, below `limits.body_max`.
    pub body_max: Option<ByteSize>,
    /// Media items in one request.
    pub media_max: Option<u32>,
    /// Of all its keys together.
    #[serde(default)]
    pub limits: RateLimits,
    /// Of each of its keys.
    #[serde(default)]
    pub per_key: RateLimits,
}

fn one() -> u32 {
    1
}

/// What may be used; a limit that is left out is none.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RateLimits {
    pub requests_per_minute: Option<u64>,
    /// Most requests at once after a quiet time. Default: those of ten seconds, one at least.
    pub requests_burst: Option<u64>,
    /// Prompt tokens, those of media included.
    pub prompt_tokens_per_minute: Option<u64>,
    /// Most prompt tokens at once. Default: those of a minute. A longer prompt is refused.
    pub prompt_tokens_burst: Option<u64>,
    /// Requests at a time.
    pub concurrent: Option<u32>,
}

impl From<RateLimits> for tenants::Limits {
    fn from(config: RateLimits) -> Self {
        let rate = |per_minute: Option<u64>, burst: Option<u64>, of_minute: u64| {
            let per_minute = per_minute?;
            Some(Rate { per_minute, burst: burst.unwrap_or(per_minute / of_minute).max(1) })
        };
        Self {
            requests: rate(config.requests_per_minute, config.requests_burst, 6),
            prompt_tokens: rate(config.prompt_tokens_per_minute, config.prompt_tokens_burst, 1),
            concurrent: config.concurrent,
        }
    }
}

/// What becomes of keys, whoever they belong to.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AccessConfig {
    /// Pass the client's key on to engines although it was checked here. Without tenants it passes always.
    pub forward_authorization: bool,
    /// File with the key that engines want (`--api-key`): sent to them in place of the client's.
    pub engine_key_file: Option<PathBuf>,
    /// File with the secret from which the salts of isolated tenants are made. The same in all balancers.
    pub isolation_secret_file: Option<PathBuf>,
    /// Environment variable with that secret; the file wins.
    pub isolation_secret_env: Option<String>,
    /// Key files are looked at this often.
    #[serde(with = "human_duration")]
    pub keys_poll: Duration,
}

impl Default for AccessConfig {
    fn default() -> Self {
        Self {
            forward_authorization: false,
            engine_key_file: None,
            isolation_secret_file: None,
            isolation_secret_env: None,
            keys_poll: Duration::from_secs(5),
        }
    }
}

/// Checks both sections against each other.
///
/// # Errors
/// The first field that cannot work.
pub fn validate(tenants: &[TenantConfig], access: &AccessConfig) -> Result<(), Invalid> {
    if tenants.len() > TENANTS_MAX {
        return Err(Invalid::new(
            "tenants",
            format!("are more than {TENANTS_MAX}"),
            "put several users into one tenant",
        ));
    }
    for (index, tenant) in tenants.iter().enumerate() {
        let within = |invalid: Invalid| invalid.within(&format!("tenants[{index}]"));
        tenant.validate().map_err(within)?;
        if tenants[..index].iter().any(|before| before.name == tenant.name) {
            let problem = format!("`{}` stands twice", tenant.name);
            return Err(within(Invalid::new("name", problem, "leave one of them out")));
        }
        let no_secret = access.isolation_secret_file.is_none() && access.isolation_secret_env.is_none();
        if tenant.isolate && no_secret {
            let remedy = "give access.isolation_secret_file, the same in all balancers";
            return Err(within(Invalid::new("isolate", "needs a secret", remedy)));
        }
    }
    if access.keys_poll.is_zero() {
        return Err(Invalid::new("access.keys_poll", "is 0", "write a time such as 5s"));
    }
    Ok(())
}

impl TenantConfig {
    fn validate(&self) -> Result<(), Invalid> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if self.name.is_empty() || self.name.len() > NAME_MAX || !self.name.chars().all(plain) {
            let remedy = format!("write up to {NAME_MAX} of A-Z a-z 0-9 _ - .");
            return Err(Invalid::new("name", format!("is `{}`", self.name), remedy));
        }
        if RESERVED.contains(&self.name.as_str()) {
            return Err(Invalid::new("name", format!("`{}` is taken by the metrics", self.name), "write another"));
        }
        if self.keys_file.is_none() && self.keys_env.is_none() && self.keys_sha256.is_empty() {
            return Err(Invalid::new(
                "keys_file",
                "and keys_env and keys_sha256 are left out",
                "give the tenant a key",
            ));
        }
        if let Some(at) = self.keys_sha256.iter().position(|text| Digest::from_hex(text).is_none()) {
            let remedy = "write 64 hex digits: printf %s KEY | sha256sum";
            return Err(Invalid::new(format!("keys_sha256[{at}]"), "is no SHA-256", remedy));
        }
        if self.weight == 0 || self.weight > 1000 {
            return Err(Invalid::new("weight", "is 0 or more than 1000", "write 1 to 1000"));
        }
        if self.body_max.is_some_and(|size| size.as_u64() == 0) {
            return Err(Invalid::new("body_max", "is 0", "write a size such as 8MiB, or leave it out"));
        }
        self.limits.validate().map_err(|invalid| invalid.within("limits"))?;
        self.per_key.validate().map_err(|invalid| invalid.within("per_key"))
    }
}

impl RateLimits {
    fn validate(&self) -> Result<(), Invalid> {
        let rates = [
            ("requests", self.requests_per_minute, self.requests_burst),
            ("prompt_tokens", self.prompt_tokens_per_minute, self.prompt_tokens_burst),
        ];
        for (what, per_minute, burst) in rates {
            for (field, value) in [("per_minute", per_minute), ("burst", burst)] {
                if value.is_some_and(|value| !(1..=UNITS_MAX).contains(&value)) {
                    let remedy = "write 1 or more, or leave it out for no limit";
                    return Err(Invalid::new(
                        format!("{what}_{field}"),
                        format!("is 0 or more than {UNITS_MAX}"),
                        remedy,
                    ));
                }
            }
            if burst.is_some() && per_minute.is_none() {
                let (field, remedy) = (format!("{what}_burst"), format!("give {what}_per_minute too"));
                return Err(Invalid::new(field, "has no rate", remedy));
            }
        }
        match self.concurrent {
            Some(0) => Err(Invalid::new("concurrent", "is 0", "write 1 or more, or leave it out for no limit")),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::BalancerConfig;

    #[track_caller]
    fn check(tenants: &str, expect: &str) {
        let text = format!("tenants: [{tenants}]\n");
        let got = fovea_service::config::parse::<BalancerConfig>(&text, "balancer.yaml");
        let got = got.map_or_else(|error| error.to_string(), |_| "ok".to_owned());
        assert!(got.contains(expect), "{got}");
    }

    #[test]
    fn what_cannot_work_names_its_field() {
        check("{name: a, keys_file: k}", "ok");
        check("{name: a, keys_env: K, limits: {requests_per_minute: 60}, per_key: {concurrent: 2}}", "ok");
        check("{name: a}", "tenants[0].keys_file: and keys_env and keys_sha256 are left out");
        check("{name: 'a b', keys_file: k}", "tenants[0].name: is `a b`");
        check("{name: default, keys_file: k}", "tenants[0].name: `default` is taken");
        check("{name: a, keys_file: k}, {name: a, keys_file: l}", "tenants[1].name: `a` stands twice");
        check("{name: a, keys_sha256: [ab]}", "tenants[0].keys_sha256[0]: is no SHA-256");
        check("{name: a, keys_file: k, isolate: true}", "tenants[0].isolate: needs a secret");
        check("{name: a, keys_file: k, weight: 0}", "tenants[0].weight");
        check("{name: a, keys_file: k, limits: {requests_per_minute: 0}}", "tenants[0].limits.requests_per_minute");
        check("{name: a, keys_file: k, per_key: {prompt_tokens_burst: 5}}", "tenants[0].per_key.prompt_tokens_burst");
        check("{name: a, keys_file: k, limits: {concurrent: 0}}", "tenants[0].limits.concurrent: is 0");
    }

    #[test]
    fn bursts_have_defaults() {
        let limits = |text: &str| -> fovea_balancer_core::tenants::Limits {
            let text = format!("tenants: [{{name: a, keys_file: k, limits: {{{text}}}}}]");
            fovea_service::config::parse::<BalancerConfig>(&text, "b").unwrap().tenants[0].limits.into()
        };
        let burst = |text: &str| limits(text).requests.map(|rate| rate.burst);
        assert_eq!(["requests_per_minute: 600", "requests_per_minute: 1", ""].map(burst), [Some(100), Some(1), None]);
        assert_eq!(limits("prompt_tokens_per_minute: 600").prompt_tokens.map(|rate| rate.burst), Some(600));
    }
}
