//! Parses the times that stores send, in the forms that are in use.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Returns the time of a header or a listing; `None` for a text of another form.
///
/// Reads HTTP dates (RFC 9110), RFC 3339 with a space or no zone or with an offset, and seconds since 1970.
pub(crate) fn parse(text: &str) -> Option<SystemTime> {
    let text = text.trim();
    if let Ok(at) = httpdate::parse_http_date(text) {
        return Some(at);
    }
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
        return UNIX_EPOCH.checked_add(Duration::from_secs(text.parse().ok()?));
    }
    // Some stores write a weekday or a zone that RFC 9110 does not have.
    if let Some(rest) = text.strip_suffix("UTC").or_else(|| text.strip_suffix("+0000")) {
        let rest = rest.trim_end();
        let as_http = httpdate::parse_http_date(&format!("{rest} GMT")).ok();
        return as_http.or_else(|| humantime::parse_rfc3339_weak(rest).ok());
    }
    if let Some((local, is_ahead, offset)) = offset(text) {
        let at = humantime::parse_rfc3339_weak(local).ok()?;
        return if is_ahead { at.checked_sub(offset) } else { at.checked_add(offset) };
    }
    humantime::parse_rfc3339_weak(text).ok()
}

/// Splits `2024-11-05T10:00:00+01:00` into the local time, whether it is ahead of UTC, and by how much.
fn offset(text: &str) -> Option<(&str, bool, Duration)> {
    // The date has hyphens, too.
    let at = text.rfind(['+', '-']).filter(|at| *at >= "2024-11-05T10:00".len())?;
    let digits: String = text.get(at + 1..)?.chars().filter(|c| *c != ':').collect();
    if digits.len() != 4 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let (hours, minutes): (u64, u64) = (digits[..2].parse().ok()?, digits[2..].parse().ok()?);
    let is_ahead = text.as_bytes().get(at) == Some(&b'+');
    Some((text.get(..at)?, is_ahead, Duration::from_secs(hours * 3600 + minutes * 60)))
}

/// Returns nanoseconds since 1970; `None` for a time that they cannot express.
pub(crate) fn unix_ns(at: SystemTime) -> Option<i64> {
    match at.duration_since(UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_nanos()).ok(),
        Err(before) => i64::try_from(before.duration().as_nanos()).ok().and_then(i64::checked_neg),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_in_use_is_read() {
        let seconds = |text: &str| parse(text).and_then(unix_ns).map(|ns| ns / 1_000_000_000);
        for text in [
            "2024-11-05T10:00:00.000Z",
            "2024-11-05T10:00:00Z",
            "2024-11-05 10:00:00",
            "2024-11-05T10:00:00.123456789Z",
            "2024-11-05T12:00:00+02:00",
            "2024-11-05T08:30:00-0130",
            "Tue, 05 Nov 2024 10:00:00 GMT",
            "Tuesday, 05-Nov-24 10:00:00 GMT",
            "Tue Nov  5 10:00:00 2024",
            "Tue, 05 Nov 2024 10:00:00 UTC",
            "Tue, 05 Nov 2024 10:00:00 +0000",
            "2024-11-05 10:00:00 UTC",
            " 1730800800 ",
        ] {
            assert_eq!(seconds(text), Some(1_730_800_800), "{text}");
        }
        for text in
            ["", "yesterday", "2024-11-05T10:00:00+xx:yy", "99999999999999999999", "2024-13-05T10:00:00Z"]
        {
            assert_eq!(seconds(text), None, "{text}");
        }
    }
}
