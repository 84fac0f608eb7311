//! Times as AWS's tools and services write them.

use std::time::{Duration, SystemTime};

/// Parses RFC 3339, with `UTC` or an offset in place of `Z`, too. `None` for another text.
pub(super) fn parse(text: &str) -> Option<SystemTime> {
    let text = text.trim();
    if let Ok(at) = humantime::parse_rfc3339(text) {
        return Some(at);
    }
    if let Some(plain) = text.strip_suffix("UTC") {
        return humantime::parse_rfc3339(&format!("{plain}Z")).ok();
    }
    let (plain, offset) = text.split_at_checked(text.len().checked_sub(6)?)?;
    let at = humantime::parse_rfc3339(&format!("{plain}Z")).ok()?;
    let (hours, minutes) = offset.get(1..)?.split_once(':')?;
    let seconds = hours.parse::<u64>().ok()? * 3600 + minutes.parse::<u64>().ok()? * 60;
    match offset.as_bytes()[0] {
        b'+' => at.checked_sub(Duration::from_secs(seconds)),
        b'-' => at.checked_add(Duration::from_secs(seconds)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_a_time_is_read() {
        let at = |seconds| Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(parse("1970-01-01T01:00:07Z"), at(3607));
        assert_eq!(parse("1970-01-01T01:00:07UTC"), at(3607));
        assert_eq!(parse("1970-01-01T03:30:07+02:30"), at(3607));
        assert_eq!(parse("1970-01-01T00:00:07-01:00"), at(3607));
        for bad in ["", "soon", "1970-01-01T01:00:07*01:00", "1970-01-01T01:00:07+1", "äöüäöü"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
