//! The share of its entries that a version may lose before a tag moves to it.
//!
//! An outage, a listing that ends early, or a wrong path can make a version that is valid and has fewer
//! entries. Jobs would train on a part of the data without an error. So a tag moves to a version that lost
//! more than one entry and more than 1 % of them only if the user allows it (`--allow-loss`).

use crate::failure::Failure;
use crate::out::count;
use std::fmt;
use std::str::FromStr;

/// A share of the entries, in millionths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share(u32);

impl Share {
    /// What a version may lose without `--allow-loss`, and one entry in any case.
    const DEFAULT: Share = Share(10_000);

    /// Whether `lost` of `all` is at most this share.
    fn allows(self, lost: u64, all: u64) -> bool {
        u128::from(lost) * 1_000_000 <= u128::from(self.0) * u128::from(all)
    }

    /// Returns the least share in whole percent that allows `lost` of `all`.
    fn of(lost: u64, all: u64) -> Share {
        let percent = (u128::from(lost) * 100).div_ceil(u128::from(all.max(1))).min(100);
        Share(u32::try_from(percent).unwrap_or(100) * 10_000)
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", f64::from(self.0) / 10_000.0)
    }
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not a share; write, for example, 5% or 0.05");
        let (number, whole) = match text.strip_suffix('%') {
            Some(number) => (number, 100.0),
            None => (text, 1.0),
        };
        let share = number.trim().parse::<f64>().map_err(|_| wrong())? / whole;
        if !(0.0..=1.0).contains(&share) {
            return Err(wrong());
        }
        // At most a million.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 1,000,000")]
        Ok(Share((share * 1e6).round() as u32))
    }
}

/// What a version has, and what it is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loss {
    /// Entries of the version.
    pub entries: u64,
    /// Entries that were left out because they could not be read.
    pub left_out: u64,
    /// Entries of the version that the tag names now.
    pub before: Option<u64>,
}

impl Loss {
    /// Checks that a tag may move to the version.
    ///
    /// # Errors
    /// The [`Failure`] of the run, with the option that allows the loss.
    pub fn check(self, allowed: Option<Share>, tag: &str) -> Result<(), Failure> {
        let Loss { entries, left_out, before } = self;
        // A share that the user names counts as it is, also 0.
        let may_lose = |lost: u64, all: u64| match allowed {
            Some(allowed) => allowed.allows(lost, all),
            None => lost <= 1 || Share::DEFAULT.allows(lost, all),
        };
        let allowed = allowed.unwrap_or(Share::DEFAULT);
        let listed = entries + left_out;
        if !may_lose(left_out, listed) {
            let least = Share::of(left_out, listed);
            return Err(Failure::new(format!(
                "{} of {listed} could not be read: more than {allowed} of the version, so the tag {tag} was \
                 not moved and nothing was written",
                count(left_out, "entry"),
            ))
            .hint(format!("repair them; or, if the version may lack them, add --allow-loss {least}")));
        }
        let Some(before) = before else { return Ok(()) };
        let gone = before.saturating_sub(entries);
        if !may_lose(gone, before) {
            let least = Share::of(gone, before);
            return Err(Failure::new(format!(
                "the version would have {}, and the one before has {before}: it would lose more than \
                 {allowed}, so the tag {tag} was not moved and nothing was written",
                count(entries, "entry"),
            ))
            .hint(format!(
                "check the path and the store; if the data was deleted, add --allow-loss {least}"
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_may_lose_one_percent_unless_more_is_allowed() {
        let loss = |entries, left_out, before| Loss { entries, left_out, before };
        let ok = |loss: Loss, share: &str| loss.check(share.parse().ok(), "latest").is_ok();
        for (loss, is_allowed) in [
            (loss(99, 1, None), true),
            (loss(98, 2, None), false),
            (loss(118, 782, Some(900)), false),
            (loss(10, 0, Some(25)), false),
            (loss(99, 0, Some(100)), true),
            (loss(98, 0, Some(100)), false),
            (loss(200, 0, Some(100)), true),
            (loss(0, 0, None), true),
            (loss(0, 0, Some(0)), true),
        ] {
            assert_eq!(ok(loss, "1%"), is_allowed, "{loss:?}");
            assert!(ok(loss, "1"), "{loss:?}");
            assert_eq!(loss.check(None, "latest").is_ok(), is_allowed, "{loss:?}");
        }
        // One entry may be lost, unless the user says how many.
        for loss in [loss(4, 1, Some(5)), loss(1, 0, Some(2)), loss(0, 0, Some(1))] {
            assert!(loss.check(None, "latest").is_ok() && !ok(loss, "1%") && !ok(loss, "0"), "{loss:?}");
        }
        let failure = loss(10, 0, Some(25)).check(None, "latest").expect_err("too few");
        assert_eq!(failure.hint.as_deref().and_then(|h| h.rsplit(' ').next()), Some("60%"));
        assert!(ok(loss(10, 0, Some(25)), "60%"));
        let failure = loss(4, 2, None).check(None, "latest").expect_err("too few");
        assert!(failure.hint.as_deref().is_some_and(|h| h.ends_with("--allow-loss 34%")), "{failure}");
        assert!(ok(loss(4, 2, None), "34%"));
    }

    #[test]
    fn shares_are_fractions_or_percent() {
        for (text, share) in
            [("5%", 50_000), ("0.05", 50_000), ("0", 0), ("100%", 1_000_000), ("0.5 %", 5_000)]
        {
            assert_eq!(text.parse(), Ok(Share(share)), "{text}");
        }
        for text in ["", "5", "-1%", "101%", "nan", "x%"] {
            assert!(text.parse::<Share>().is_err(), "{text}");
        }
        assert_eq!(
            (Share::DEFAULT.to_string(), Share(123_456).to_string()),
            ("1%".into(), "12.3456%".into())
        );
    }
}
