"""Write the prompts of `sql.jsonl`: questions about a table, to be answered with one SQL query.

    python examples/retrain/sql.py > sql.jsonl

Every table is asked four of the twelve questions. A table is the `template` of its prompts, the unit of splitting: what
is evaluated is about tables that were never trained on.
"""

from __future__ import annotations

import json

# table: (what a row is, its name, a class of it, one value of that class, a number, its unit, a day)
TABLES: dict[str, tuple[str, str, str, str, str, str, str]] = {
    "orders": ("order", "customer", "status", "shipped", "total", "euros", "ordered_on"),
    "employees": ("employee", "full_name", "department", "Sales", "salary", "euros a year", "hired_on"),
    "books": ("book", "title", "genre", "history", "pages", "pages", "published_on"),
    "flights": ("flight", "flight_number", "airline", "Norwind", "delay_minutes", "minutes", "departed_on"),
    "patients": ("patient", "surname", "ward", "surgery", "age", "years", "admitted_on"),
    "invoices": ("invoice", "supplier", "currency", "CHF", "amount", "units", "due_on"),
    "films": ("film", "title", "director", "Alma Reyes", "runtime_minutes", "minutes", "released_on"),
    "houses": ("house", "address", "city", "Leeds", "price", "pounds", "listed_on"),
    "students": ("student", "full_name", "course", "biology", "credits", "credits", "enrolled_on"),
    "tickets": ("support ticket", "subject", "priority", "urgent", "hours_open", "hours", "opened_on"),
    "sensors": ("sensor", "serial_number", "room", "cellar", "temperature", "degrees", "calibrated_on"),
    "shipments": ("shipment", "tracking_code", "carrier", "Postlink", "weight_kg", "kilograms", "sent_on"),
    "players": ("player", "nickname", "team", "Harbour", "goals", "goals", "joined_on"),
    "recipes": ("recipe", "dish", "cuisine", "Thai", "calories", "kilocalories", "added_on"),
    "cars": ("car", "number_plate", "fuel", "diesel", "mileage", "kilometres", "registered_on"),
    "concerts": ("concert", "band", "venue", "Old Mill", "tickets_sold", "tickets", "held_on"),
    "accounts": ("account", "holder", "branch", "North", "balance", "euros", "opened_on"),
    "trees": ("tree", "label", "species", "oak", "height_m", "metres", "planted_on"),
    "meetings": ("meeting", "topic", "organiser", "Mr Osei", "minutes", "minutes", "held_on"),
    "donations": ("donation", "donor", "campaign", "winter", "amount", "dollars", "given_on"),
    "rooms": ("hotel room", "room_number", "category", "suite", "price_per_night", "euros", "renovated_on"),
    "parcels": ("parcel", "recipient", "depot", "East", "volume_l", "litres", "arrived_on"),
    "courses": ("course", "title", "faculty", "law", "seats", "seats", "starts_on"),
    "machines": ("machine", "model", "hall", "B", "running_hours", "hours", "serviced_on"),
    "songs": ("song", "title", "album", "Blue Rain", "seconds", "seconds", "recorded_on"),
    "claims": ("insurance claim", "policy_holder", "kind", "water damage", "amount", "euros", "filed_on"),
    "wines": ("wine", "label", "region", "Douro", "price", "euros", "bottled_on"),
    "races": ("race", "winner", "track", "Lakeside", "laps", "laps", "run_on"),
    "animals": ("animal", "pet_name", "species", "cat", "weight_kg", "kilograms", "adopted_on"),
    "projects": ("project", "title", "manager", "Ines Kraus", "budget", "euros", "started_on"),
    "visits": ("museum visit", "group_name", "exhibition", "Bronze Age", "visitors", "visitors", "booked_on"),
    "bridges": ("bridge", "bridge_name", "river", "Tamar", "length_m", "metres", "inspected_on"),
    "loans": ("library loan", "reader", "library", "Central", "days_overdue", "days", "lent_on"),
    "articles": ("article", "headline", "section", "science", "words", "words", "printed_on"),
    "bakes": ("bake", "bake_code", "product", "rye bread", "defects", "defects", "baked_on"),
    "downloads": ("download", "file_name", "country", "Chile", "megabytes", "megabytes", "downloaded_on"),
    "trips": ("bicycle trip", "rider", "start_station", "Market Square", "distance_km", "kilometres", "ridden_on"),
    "exams": ("exam", "candidate", "subject", "chemistry", "points", "points", "taken_on"),
    "satellites": ("satellite", "satellite_name", "operator", "Orbita", "altitude_km", "kilometres", "launched_on"),
    "tenants": ("tenant", "surname", "building", "Elm House", "rent", "euros a month", "moved_in_on"),
    "valves": ("valve", "part_number", "line", "cooling", "pressure_bar", "bar", "replaced_on"),
    "voters": ("voter", "full_name", "district", "Riverside", "age", "years", "registered_on"),
    "podcasts": ("podcast episode", "title", "host", "Lena Vogt", "listeners", "listeners", "published_on"),
    "ferries": ("ferry crossing", "ship_name", "route", "Hook-Harwich", "passengers", "passengers", "sailed_on"),
    "payments": ("payment", "payer", "method", "card", "amount", "pounds", "paid_on"),
    "samples": ("soil sample", "sample_code", "field", "West", "acidity", "pH units", "taken_on"),
    "guests": ("guest", "full_name", "country", "Peru", "nights", "nights", "arrived_on"),
    "reviews": ("review", "author", "product", "kettle", "stars", "stars", "written_on"),
    "servers": ("server", "host_name", "region", "south", "memory_gb", "gigabytes", "rebooted_on"),
    "matches": ("football match", "opponent", "stadium", "Parkside", "spectators", "spectators", "played_on"),
    "paintings": ("painting", "title", "painter", "Ida Holm", "width_cm", "centimetres", "acquired_on"),
    "turbines": ("wind turbine", "turbine_name", "farm", "Coast", "output_mw", "megawatts", "commissioned_on"),
    "lessons": ("piano lesson", "pupil", "teacher", "Ms Abe", "minutes", "minutes", "given_on"),
    "harvests": ("harvest", "plot_name", "crop", "barley", "tonnes", "tonnes", "finished_on"),
    "alarms": ("alarm", "device", "cause", "smoke", "response_minutes", "minutes", "raised_on"),
    "stamps": ("stamp", "motif", "issuer", "Helvetia", "face_value", "cents", "issued_on"),
    "quizzes": ("quiz night", "winner", "pub", "Red Lion", "teams", "teams", "held_on"),
    "elevators": ("elevator", "serial_number", "maker", "Altis", "floors", "floors", "inspected_on"),
    "papers": ("paper", "title", "journal", "Annals", "citations", "citations", "accepted_on"),
    "plots": ("garden plot", "tenant", "soil", "clay", "area_m2", "square metres", "leased_on"),
}

QUESTIONS = (
    "How many {row}s are there for each {kind}?",
    "List the {name} of every {row} whose {kind} is '{value}', in alphabetical order.",
    "What is the average {number} per {kind}? Show the highest average first.",
    "Which five {row}s have the largest {number}? Return {name} and {number}.",
    "Find all {row}s with {day} in the year 2023.",
    "Which {kind} has more than ten {row}s?",
    "Return the {name} of the {row}s that have more than the average {number}.",
    "Change the {kind} of all {row}s with a {number} below 10 {unit} to '{value}'.",
    "Delete every {row} whose {day} is before 2010-01-01.",
    "What is the sum of {number} for the {kind} '{value}'?",
    "For each {kind}, show the {name} of the {row} with the latest {day}.",
    "Add a {row} with {kind} '{value}' and a {number} of 42 {unit}; make up the rest.",
)
EACH = 4


def rows() -> list[dict[str, str]]:
    """All prompts, table by table."""
    found = []
    for place, (table, (row, name, kind, value, number, unit, day)) in enumerate(TABLES.items()):
        columns = f"id INTEGER PRIMARY KEY, {name} TEXT, {kind} TEXT, {number} REAL, {day} DATE"
        for step in range(EACH):
            form = (place + 3 * step) % len(QUESTIONS)
            words = {"row": row, "name": name, "kind": kind, "value": value, "number": number, "unit": unit, "day": day}
            question = QUESTIONS[form].format_map(words)
            prompt = f"Given the table {table} ({columns}), write one SQL query. {question}"
            found.append({"id": f"{table}-{form}", "template": table, "prompt": prompt})
    return found


if __name__ == "__main__":
    for item in rows():
        print(json.dumps(item))
