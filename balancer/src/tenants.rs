//! Tenants: whose key a request carries, and what of its limits is left. Decisions are in `fovea_balancer_core::tenants`.
//!
//! **Invariant:** of a key only its digest is kept; neither a key nor a digest is ever logged or shown.
//! **Invariant:** no lock is held across an await; an account's state is a few numbers, whatever the traffic.

mod admitted;
mod error;
mod keys;
pub mod metrics;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use fovea_balancer_core::tenants::{Account, Digest, Keyring, Limits};
use fovea_service::config::read_key;
use http::{HeaderMap, HeaderValue};
use tokio_util::sync::CancellationToken;

pub use admitted::Admitted;
pub use error::TenantError;
pub use keys::{KEY_HEADERS, Refused};

use crate::config::BalancerConfig;
use crate::config::tenants::{AccessConfig, TenantConfig};
use crate::prepare::Isolation;
use metrics::{ReloadEnd, TenantMetrics};

/// Keys of all tenants together: all of them are looked at for each request.
const KEYS_MAX: usize = 4096;
/// Name of everybody, where no tenants are configured.
pub const DEFAULT: &str = "default";

/// One tenant, for the life of the process.
#[derive(Debug)]
pub struct Tenant {
    /// Place in the config, from 1; 0 = everybody, where none is configured.
    pub number: u32,
    pub name: String,
    /// Share of the queue.
    pub weight: u32,
    pub isolation: Option<Isolation>,
    /// Largest request body, in bytes, below that of all.
    pub body_max: Option<u64>,
    /// Media items in one request.
    pub media_max: Option<u32>,
    /// `None` = nothing is limited.
    account: Option<Arc<Mutex<Account>>>,
    per_key: Limits,
}

/// Who asks.
#[derive(Clone, Debug)]
pub struct Caller {
    pub tenant: Arc<Tenant>,
    key: Option<Arc<Mutex<Account>>>,
}

/// Keys of the moment.
#[derive(Debug, Default)]
struct Table {
    ring: Keyring,
    /// In the order of the ring.
    owners: Vec<Owner>,
}

#[derive(Debug)]
struct Owner {
    digest: Digest,
    caller: Caller,
}

/// All tenants.
#[derive(Debug)]
pub struct Tenants {
    config: Vec<TenantConfig>,
    tenants: Vec<Arc<Tenant>>,
    table: RwLock<Arc<Table>>,
    /// Everybody, where no tenants are configured.
    anybody: Option<Caller>,
}

impl Default for Tenants {
    /// Everybody may ask.
    fn default() -> Self {
        let (config, tenants, table) = (Vec::new(), Vec::new(), RwLock::default());
        Self { config, tenants, table, anybody: Some(Caller::anybody()) }
    }
}

impl Tenants {
    /// Reads all keys. Blocking.
    ///
    /// # Errors
    /// Keys or the secret that cannot be read or used.
    pub fn load(config: &BalancerConfig) -> Result<Self, TenantError> {
        let isolates = config.tenants.iter().any(|tenant| tenant.isolate);
        let secret = isolates.then(|| keys::secret(&config.access)).transpose()?;
        let tenant = |(number, about): (u32, &TenantConfig)| {
            let isolation = secret.as_deref().filter(|_| about.isolate);
            Arc::new(Tenant {
                number,
                name: about.name.clone(),
                weight: about.weight,
                isolation: isolation.map(|secret| Isolation::new(secret, &about.name)),
                body_max: about.body_max.map(|size| size.as_u64()),
                media_max: about.media_max,
                account: account(about.limits.into()),
                per_key: about.per_key.into(),
            })
        };
        let anybody = config.tenants.is_empty().then(Caller::anybody);
        let tenants: Vec<_> = (1..).zip(&config.tenants).map(tenant).collect();
        let table = RwLock::default();
        let loaded = Self { config: config.tenants.clone(), tenants, table, anybody };
        loaded.reload()?;
        Ok(loaded)
    }

    /// No tenants are configured: everybody may ask.
    pub fn are_open(&self) -> bool {
        self.anybody.is_some()
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tenants.iter().map(|tenant| tenant.name.as_str())
    }

    /// Whose key these headers carry. Takes the same time for every key.
    ///
    /// # Errors
    /// No key, or none of ours.
    pub fn find(&self, headers: &HeaderMap) -> Result<Caller, Refused> {
        if let Some(anybody) = &self.anybody {
            return Ok(anybody.clone());
        }
        let digest = keys::digest(keys::sent(headers).ok_or(Refused::NoKey)?);
        let table = Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner));
        let found = table.ring.find(&digest).and_then(|at| table.owners.get(at));
        found.map(|owner| owner.caller.clone()).ok_or(Refused::UnknownKey)
    }

    /// Reads all keys again; true = they have changed. What a key has used stays used. Blocking.
    ///
    /// # Errors
    /// Keys that cannot be read or used: those of before stay.
    pub fn reload(&self) -> Result<bool, TenantError> {
        let mut read: Vec<(Digest, &Arc<Tenant>)> = Vec::new();
        for (tenant, config) in self.tenants.iter().zip(&self.config) {
            read.extend(keys::of(config)?.into_iter().map(|digest| (digest, tenant)));
        }
        if read.len() > KEYS_MAX {
            return Err(TenantError::TooMany { keys: read.len(), most: KEYS_MAX });
        }
        let before = Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner));
        let old = before.owners.iter().map(|owner| (owner.digest, owner.caller.tenant.number));
        if old.eq(read.iter().map(|(digest, tenant)| (*digest, tenant.number))) {
            return Ok(false);
        }
        let digests: Vec<_> = read.iter().map(|(digest, _)| *digest).collect();
        let name = |at: usize| read[at].1.name.clone();
        let twice = |twice: fovea_balancer_core::tenants::TwiceGiven| TenantError::Twice {
            first: name(twice.first),
            second: name(twice.second),
        };
        let ring = Keyring::new(&digests).map_err(twice)?;
        let known: HashMap<_, _> = before.owners.iter().map(|owner| (owner.digest, &owner.caller)).collect();
        let owner = |&(digest, tenant): &(Digest, &Arc<Tenant>)| {
            let kept = known.get(&digest).filter(|caller| caller.tenant.number == tenant.number);
            let caller = kept.map_or_else(|| Caller::new(tenant), |caller| (*caller).clone());
            Owner { digest, caller }
        };
        let owners = read.iter().map(owner).collect();
        *self.table.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(Table { ring, owners });
        Ok(true)
    }

    /// Keys at this moment.
    pub fn key_count(&self) -> usize {
        self.table.read().unwrap_or_else(PoisonError::into_inner).ring.len()
    }
}

impl Caller {
    fn new(tenant: &Arc<Tenant>) -> Self {
        Self { tenant: Arc::clone(tenant), key: account(tenant.per_key) }
    }

    fn anybody() -> Self {
        Self::new(&Arc::new(Tenant {
            number: 0,
            name: DEFAULT.to_owned(),
            weight: 1,
            isolation: None,
            body_max: None,
            media_max: None,
            account: None,
            per_key: Limits::default(),
        }))
    }
}

fn account(limits: Limits) -> Option<Arc<Mutex<Account>>> {
    (!limits.is_none()).then(|| Arc::new(Mutex::new(Account::new(limits, Instant::now()))))
}

/// `Authorization` for engines.
///
/// # Errors
/// A file that cannot be read, or that holds no key that a header takes.
pub fn engine_key(access: &AccessConfig) -> Result<Option<HeaderValue>, TenantError> {
    let field = "access.engine_key_file";
    let key = read_key(field, "", access.engine_key_file.as_deref())?;
    let value = |key: Vec<u8>| {
        let mut value =
            HeaderValue::from_bytes(&[b"Bearer ", &key[..]].concat()).map_err(|_| TenantError::Characters)?;
        value.set_sensitive(true);
        Ok(value)
    };
    key.map(value).transpose()
}

/// Reads the keys again and again, until the stop.
pub async fn watch(tenants: Arc<Tenants>, metrics: TenantMetrics, every: Duration, stop: CancellationToken) {
    let count = |tenants: &Tenants| metrics.keys.set(i64::try_from(tenants.key_count()).unwrap_or(i64::MAX));
    count(&tenants);
    let mut failed = None;
    while stop.run_until_cancelled(tokio::time::sleep(every)).await.is_some() {
        let reading = Arc::clone(&tenants);
        let Ok(read) = tokio::task::spawn_blocking(move || reading.reload()).await else { continue };
        let error = read.as_ref().err().map(|error| error_chain(error));
        match read {
            Ok(true) => {
                tracing::info!(keys = tenants.key_count(), "keys read again");
                metrics.reloaded(ReloadEnd::Loaded);
                count(&tenants);
            }
            Ok(false) => {}
            Err(_) => metrics.reloaded(ReloadEnd::Failed),
        }
        if error != failed {
            if let Some(error) = &error {
                tracing::warn!(error, "keys cannot be read again; those of before stay");
            }
            failed = error;
        }
    }
}

fn error_chain(error: &dyn std::error::Error) -> String {
    let chain = std::iter::successors(Some(error), |error| error.source());
    chain.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
