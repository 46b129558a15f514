//! A request that was let in: counted until it is dropped, and charged for what it used.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fovea_balancer_core::tenants::{Account, Exceeded, Standing, charge, enter};

use super::{Caller, Tenant};

/// A request of one caller. Dropped before [`Self::served`], its prompt is not charged.
#[derive(Debug)]
pub struct Admitted {
    caller: Caller,
    /// Prompt tokens.
    charged: u64,
    served: bool,
}

impl Caller {
    /// Lets a request in.
    ///
    /// # Errors
    /// The limit that is reached.
    pub fn enter(self, now: Instant) -> Result<Admitted, Exceeded> {
        self.with(|accounts| enter(accounts, now))?;
        Ok(Admitted { caller: self, charged: 0, served: false })
    }

    /// What is left of its limits.
    pub fn standing(&self, now: Instant) -> Standing {
        let all = |accounts: &mut [&mut Account]| {
            accounts.iter_mut().fold(Standing::default(), |all, account| all.tighter(account.standing(now)))
        };
        self.with(all)
    }

    /// The tenant's account before the key's, always.
    fn with<T>(&self, work: impl FnOnce(&mut [&mut Account]) -> T) -> T {
        let mut tenant = self.tenant.account.as_deref().map(lock);
        let mut key = self.key.as_deref().map(lock);
        match (tenant.as_deref_mut(), key.as_deref_mut()) {
            (Some(tenant), Some(key)) => work(&mut [tenant, key]),
            (Some(account), None) | (None, Some(account)) => work(&mut [account]),
            (None, None) => work(&mut []),
        }
    }
}

fn lock(account: &Mutex<Account>) -> MutexGuard<'_, Account> {
    account.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Admitted {
    pub fn tenant(&self) -> &Arc<Tenant> {
        &self.caller.tenant
    }

    /// Charges the prompt; a second call replaces the first.
    ///
    /// # Errors
    /// Not so many tokens are left. The prompt is not charged then.
    pub fn charge(&mut self, tokens: u64, now: Instant) -> Result<(), Exceeded> {
        self.settle(0, now);
        self.caller.with(|accounts| charge(accounts, tokens, now))?;
        self.charged = tokens;
        Ok(())
    }

    /// The engine has taken the prompt: it stays charged, as the engine counted it where it did.
    pub fn served(&mut self, prompt_tokens: Option<u64>, now: Instant) {
        self.served = true;
        if let Some(tokens) = prompt_tokens {
            self.settle(tokens, now);
        }
    }

    pub fn standing(&self, now: Instant) -> Standing {
        self.caller.standing(now)
    }

    fn settle(&mut self, used: u64, now: Instant) {
        let charged = std::mem::replace(&mut self.charged, used);
        if charged != used {
            self.caller.with(|accounts| accounts.iter_mut().for_each(|account| account.settle(charged, used, now)));
        }
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        if !self.served {
            self.settle(0, Instant::now());
        }
        self.caller.with(|accounts| accounts.iter_mut().for_each(|account| account.leave()));
    }
}
