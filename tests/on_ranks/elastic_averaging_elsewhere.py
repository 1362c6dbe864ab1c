"""Cases of `elastic_averaging` that matter where rank 1 serves, and where there is one worker."""

from tests.on_ranks import elastic_averaging as cases

SERVER = 1

case_what_workers_gave = cases.case_what_workers_gave_is_what_the_centre_gained
case_fit = cases.case_fit_ends_with_the_centre_everywhere
case_early_stopping = cases.case_early_stopping_at_the_server_stops_all
case_a_resumed_run = cases.case_a_resumed_run_begins_at_the_servers_epoch
case_not_finite = cases.case_weights_that_are_not_finite_stay_away_from_the_centre
case_slots_are_a_mean = cases.case_slots_are_a_mean_over_workers
case_the_plan = cases.case_the_plan_names_the_server
