//! The one place that reads the clock, for `strftime_now` in templates.

use jiff::ZonedDateTime;
use jiff::civil::DateTime;

/// Wall-clock time in the zone of this process. Engines use theirs: keep the zones equal (`TZ`) for templates that print the time.
pub fn local_now() -> DateTime {
    ZonedDateTime::now().datetime()
}
