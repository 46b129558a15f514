//! What each tenant used. Label values are names of the config, `default` where there are no tenants, `unknown` for who has no key.

use fovea_service::snake_case_labels;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::metrics::ErrorKind;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenKind {
    Prompt,
    /// Of the prompt, found in the engine's cache.
    Cached,
    /// Of the prompt, in place of images.
    Image,
    Completion,
}

/// Who counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// The engine, in its `usage`.
    Engine,
    /// This balancer: prompts as predicted or guessed, answers by the events of their stream.
    Estimate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReloadEnd {
    Loaded,
    Failed,
}

snake_case_labels!(TokenKind, Source, ReloadEnd);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct TenantLabels {
    pub tenant: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct TokenLabels {
    pub tenant: String,
    pub kind: TokenKind,
    pub source: Source,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RefusalLabels {
    pub tenant: String,
    pub cause: ErrorKind,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReloadLabels {
    pub end: ReloadEnd,
}

#[derive(Clone, Debug)]
pub struct TenantMetrics {
    requests: Family<TenantLabels, Counter>,
    tokens: Family<TokenLabels, Counter>,
    refusals: Family<RefusalLabels, Counter>,
    reloads: Family<ReloadLabels, Counter>,
    pub keys: Gauge,
}

impl TenantMetrics {
    pub fn register(r: &mut Registry) -> Self {
        let metrics = Self {
            requests: Family::default(),
            tokens: Family::default(),
            refusals: Family::default(),
            reloads: Family::default(),
            keys: Gauge::default(),
        };
        r.register("tenant_requests", "Requests that an engine answered, by tenant", metrics.requests.clone());
        r.register("tenant_tokens", "Tokens of these, by tenant, kind and who counted", metrics.tokens.clone());
        r.register("tenant_refusals", "Requests refused or broken off, by tenant and cause", metrics.refusals.clone());
        r.register("key_reloads", "Changed key files read again, by end", metrics.reloads.clone());
        r.register("keys", "Keys of all tenants", metrics.keys.clone());
        metrics
    }

    pub fn request(&self, tenant: &str) {
        self.requests.get_or_create(&TenantLabels { tenant: tenant.to_owned() }).inc();
    }

    pub fn tokens(&self, tenant: &str, kind: TokenKind, source: Source, tokens: u64) {
        if tokens > 0 {
            self.tokens.get_or_create(&TokenLabels { tenant: tenant.to_owned(), kind, source }).inc_by(tokens);
        }
    }

    pub fn refused(&self, tenant: &str, cause: ErrorKind) {
        self.refusals.get_or_create(&RefusalLabels { tenant: tenant.to_owned(), cause }).inc();
    }

    pub fn reloaded(&self, end: ReloadEnd) {
        self.reloads.get_or_create(&ReloadLabels { end }).inc();
    }
}
