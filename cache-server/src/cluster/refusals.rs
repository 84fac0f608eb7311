//! What servers refuse each other until somebody changes a setting or a build: a token, or an answer that
//! this build cannot read.
//!
//! I1. The log gets one warning when a refusal begins, and one line when it has ended. A refusal that comes
//!     and goes is logged once in [`LOG_EVERY`].
//! I2. A refusal ends with an answer that shows the opposite, or when the member is no longer in the view.

use fletch_core::MemberId;
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// How often the same refusal of a member is logged.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// Why two servers do not work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RefusalReason {
    /// The member does not take this server's token.
    Token,
    /// One of the two asks for tokens, and the other one serves everybody.
    TokensDiffer,
    /// The member's answer cannot be read.
    Unreadable,
}

impl RefusalReason {
    /// Returns the word of metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            RefusalReason::Token => "token",
            RefusalReason::TokensDiffer => "tokens_differ",
            RefusalReason::Unreadable => "unreadable",
        }
    }

    fn fix(self) -> &'static str {
        match self {
            RefusalReason::Token => {
                "compare cluster.peer_token_file of this server with the tokens file of that one"
            }
            RefusalReason::TokensDiffer => "give all servers of the cluster the same auth.tokens",
            RefusalReason::Unreadable => {
                "check cluster.peer_url of that server, the builds of the two, and proxies between them"
            }
        }
    }
}

#[derive(Debug, Default)]
struct Refusal {
    times: u64,
    /// What was said last, while it lasts.
    lasts: Option<String>,
    logged: Option<Instant>,
}

/// The refusals between this server and the others.
#[derive(Debug, Default)]
pub struct Refusals {
    all: Mutex<BTreeMap<(MemberId, RefusalReason), Refusal>>,
}

impl Refusals {
    /// Notes a refusal.
    pub fn note(&self, id: &MemberId, reason: RefusalReason, detail: &str) {
        let mut all = self.all.lock();
        let refusal = all.entry((id.clone(), reason)).or_default();
        refusal.times += 1;
        if refusal.lasts.replace(detail.to_owned()).is_some() {
            return;
        }
        if refusal.logged.is_none_or(|at| at.elapsed() >= LOG_EVERY) {
            refusal.logged = Some(Instant::now());
            let (reason, fix) = (reason.as_str(), reason.fix());
            tracing::warn!(peer = %id, reason, "two servers refuse each other: {detail}; {fix}");
        }
    }

    /// Notes that a refusal has ended.
    pub fn end(&self, id: &MemberId, reason: RefusalReason) {
        let mut all = self.all.lock();
        let Some(refusal) = all.get_mut(&(id.clone(), reason)) else { return };
        if refusal.lasts.take().is_some() {
            tracing::info!(peer = %id, reason = reason.as_str(), "the refusal between two servers has ended");
        }
    }

    /// Ends the refusals of members that are gone.
    pub fn retain(&self, is_member: impl Fn(&MemberId) -> bool) {
        for ((id, _), refusal) in self.all.lock().iter_mut() {
            if !is_member(id) {
                refusal.lasts = None;
            }
        }
    }

    /// Returns how often each member refused or was refused, by the reason.
    #[must_use]
    pub fn counts(&self) -> Vec<(MemberId, &'static str, u64)> {
        let all = self.all.lock();
        all.iter().map(|((id, reason), refusal)| (id.clone(), reason.as_str(), refusal.times)).collect()
    }

    /// Returns a text for each refusal that lasts.
    #[must_use]
    pub fn lasting(&self) -> Vec<String> {
        let all = self.all.lock();
        let text = |((id, reason), refusal): (&(MemberId, RefusalReason), &Refusal)| {
            let detail = refusal.lasts.as_ref()?;
            Some(format!("{id} ({}): {detail}; {}", reason.as_str(), reason.fix()))
        };
        all.iter().filter_map(text).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_lasts_until_the_opposite_is_seen() {
        let (refusals, id) = (Refusals::default(), MemberId::new("b").expect("a name"));
        refusals.note(&id, RefusalReason::Token, "it answered 401");
        refusals.note(&id, RefusalReason::Token, "it answered 403");
        refusals.note(&id, RefusalReason::Unreadable, "no JSON");
        refusals.end(&id, RefusalReason::Unreadable);
        let lasting = refusals.lasting();
        assert!(lasting.len() == 1 && lasting[0].contains("b (token): it answered 403"), "{lasting:?}");
        assert_eq!(refusals.counts(), [(id.clone(), "token", 2), (id.clone(), "unreadable", 1)]);
        refusals.retain(|_| false);
        assert_eq!((refusals.lasting().len(), refusals.counts().len()), (0, 2));
        let logged = || refusals.all.lock()[&(id.clone(), RefusalReason::Unreadable)].logged;
        let first = logged();
        refusals.note(&id, RefusalReason::Unreadable, "no JSON");
        assert!(first.is_some() && logged() == first, "it comes and goes, and is logged once a minute");
    }
}
