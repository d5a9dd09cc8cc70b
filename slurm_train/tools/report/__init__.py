"""A report: what is on record about a run or a sweep as one JSON document, and that document as HTML or PNG. No torch.

`run.run_document` and `sweep.sweep_document` read the files, `page.render` and `pictures.write_pictures` draw.
"""
